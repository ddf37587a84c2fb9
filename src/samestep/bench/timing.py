"""Steps of several variants, taking turns in one run.

Machines differ and their load changes by the minute; the ratio of two neighbours in time changes least. So
each round runs every variant once, all ranks starting together, and what counts is the ratio in the round.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from samestep import collectives
from samestep.bench.models import Loss

__all__ = ["Step", "make_step", "ratios", "spread", "time_rounds"]

Step = Callable[[], None]
_WARM_UP_STEPS = 3
_ROUND_S = 0.3


def make_step(
    model: nn.Module,
    loss_of: Loss,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> Step:
    """One training step of `model`, with AdamW if nothing else is asked for."""
    optimizer = make_optimizer(model) if make_optimizer else torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    return step


def time_rounds(
    steps: dict[str, Step],
    num_rounds: int,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    steps_per_round: int | None = None,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds per step, by variant and round, of the slowest rank.

    Ranks: all of `group`, with the same variants in the same order.

    Args:
        steps_per_round: how often each variant steps in a round. Default: about 0.3 s long.
        on_round: called after each variant in each round, to show progress.
    """
    for step in steps.values():
        for _ in range(_WARM_UP_STEPS):
            step()
    if steps_per_round is None:
        slowest_s = max(_time(step, 1, group, device) for step in steps.values())
        steps_per_round = max(1, math.ceil(_ROUND_S / slowest_s))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(num_rounds):
        for name, step in steps.items():
            times[name].append(_time(step, steps_per_round, group, device))
            on_round()
    return times


def _time(step: Step, num_steps: int, group: dist.ProcessGroup, device: torch.device) -> float:
    collectives.barrier(group)
    start_s = time.perf_counter()
    for _ in range(num_steps):
        step()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    took_s = torch.tensor([(time.perf_counter() - start_s) / num_steps], device=device)
    collectives.all_reduce(took_s, group, op=dist.ReduceOp.MAX).wait()
    return took_s.item()


def ratios(times: dict[str, list[float]], name: str, to: str) -> list[float]:
    """Of variant `name` to variant `to`, round by round."""
    return [mine / theirs for mine, theirs in zip(times[name], times[to], strict=True)]


def spread(values: Sequence[float]) -> str:
    """Median, least and greatest, as a table shows them."""
    return f"{statistics.median(values):.3f} ({min(values):.2f} .. {max(values):.2f})"
