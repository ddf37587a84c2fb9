"""Time of one training step: unsynchronised replicas, torch's DDP, ours, and ours with a sharded optimizer.

    samestep run --nproc 2 benchmarks/step.py

All take turns in one run. Each round runs every variant once, some steps long, all ranks starting together;
the figure is the ratio to the unsynchronised replicas (the limit), or to torch's DDP, within the round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import samestep
from samestep.bench.models import WORKLOADS
from samestep.bench.timing import make_step, ratios, spread, time_rounds

sys.path.insert(0, str(Path(__file__).parent))
from _paired import machine, publish

LIMIT, TORCH = "unsynchronised", "torch DDP, Gloo"


@dataclass(frozen=True)
class Variant:
    """How the model is wrapped, and which optimizer updates it."""

    wrap: Callable[[nn.Module], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None


def sharded(stage: int) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: samestep.ShardedOptimizer(model, torch.optim.AdamW, stage=stage)


def variants(groups: dict[str, dist.ProcessGroup]) -> dict[str, Variant]:
    torch_ddp, ours = nn.parallel.DistributedDataParallel, samestep.DistributedDataParallel
    found = {LIMIT: Variant(lambda model: model)}
    for name, group in groups.items():
        found[f"torch DDP, {name}"] = Variant(lambda m, g=group: torch_ddp(m, process_group=g))
        found[f"samestep, {name}"] = Variant(lambda m, g=group: ours(m, process_group=g))
        for stage in (1, 2):
            found[f"samestep, sharded (stage {stage}), {name}"] = Variant(
                lambda m, g=group: ours(m, process_group=g), sharded(stage)
            )
    return found


def rows(title: str, times: dict[str, list[float]]) -> list[list[str]]:
    return [
        [
            title,
            name,
            f"{statistics.median(figures) * 1e3:.1f} ms",
            spread(ratios(times, name, LIMIT)),
            "" if name in (LIMIT, TORCH) else spread(ratios(times, name, TORCH)),
        ]
        for name, figures in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shm", action="store_true", help='also over the backend "shm"')
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="write the table between the marks of this page")
    options = parser.parse_args()

    with samestep.World(backend="gloo") as world:
        groups: dict[str, Any] = {"Gloo": world.group}
        if options.shm:
            from samestep import shm

            shm.register()
            groups["shm"] = dist.new_group(backend="shm")
        table, record = [], {}
        for name in options.models:
            workload = WORKLOADS[name]
            steps = {}
            for title, variant in variants(groups).items():
                torch.manual_seed(0)
                model, loss_of = workload.make(world.device)
                steps[title] = make_step(variant.wrap(model), loss_of, variant.make_optimizer)
            times = time_rounds(steps, options.rounds, world.group, world.device)
            table += rows(workload.title, times)
            record[name] = times
            del steps
        if not world.is_main:
            return
        where = {"num_ranks": world.size, **machine()}
        publish(
            "One training step, AdamW: median (min .. max)",
            ["model", "variant", "step", "to unsynchronised", "to torch DDP"],
            table,
            where=where,
            record={"machine": where, "seconds_per_step": record},
            json_path=options.json,
            page=options.page,
            marker="step",
        )


if __name__ == "__main__":
    main()
