"""Train with our wrapper on every rank of a test, and compare gradients by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep import DistributedDataParallel
from samestep.testing import thread_ranks

_RNG_LOCK = threading.Lock()


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    """What `make()` returns with torch's random stream at `seed`; one thread at a time."""
    with _RNG_LOCK, torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal random numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def on_ranks(
    build: Callable[[], nn.Module],
    train: Callable[[DistributedDataParallel, int, int], Any],
    world_size: int = 2,
    **options: Any,
) -> list[Any]:
    """What `train(wrapped model, rank, size)` returned on each rank."""

    def run(group: dist.ProcessGroup) -> Any:
        model = DistributedDataParallel(seeded(build), process_group=group, **options)
        return train(model, group.rank(), group.size())

    return thread_ranks(run, world_size)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """A copy of each parameter's gradient by name, without the wrapper's prefix."""
    return {
        name.removeprefix("module."): None if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }


def assert_same(
    found: dict[str, Tensor | None], expected: dict[str, Tensor | None], tolerance: float
) -> None:
    """Equal names, None in the same places, values within `tolerance` absolute and relative."""
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        other = expected[name]
        assert (gradient is None) == (other is None), f"{name}: {gradient} against {other}"
        if gradient is not None:
            torch.testing.assert_close(
                gradient, other, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def average(per_rank: list[dict[str, Tensor | None]]) -> dict[str, Tensor | None]:
    """The mean over ranks; None counts as zero unless it is None everywhere."""
    result: dict[str, Tensor | None] = {}
    for name in per_rank[0]:
        found = [g for g in (grads[name] for grads in per_rank) if g is not None]
        result[name] = sum(found[1:], found[0].clone()) / len(per_rank) if found else None
    return result
