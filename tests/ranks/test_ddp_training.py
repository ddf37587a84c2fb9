"""Gradients and weights equal those of one process on the global batch, and torch's DDP bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep import DistributedDataParallel
from samestep.testing import process_ranks, thread_ranks

from .models import batch_for, loss_of, make
from .test_shm import shm_ranks

_STEPS = 20
_SAMPLES = 12


def _train(
    name: str, wrap: Callable[[nn.Module], nn.Module], rank: int, size: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """(gradients of the last step, weights) after `_STEPS` steps of SGD with momentum."""
    model = wrap(make(name, dtype, seed=rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(_STEPS):
        inputs, targets = batch_for(name, _SAMPLES, step, dtype)
        optimizer.zero_grad()
        loss_of(model, inputs[rank::size], targets[rank::size]).backward()
        optimizer.step()
    parameters = list(model.parameters())
    return [p.grad.clone() for p in parameters if p.grad is not None], [
        p.detach().clone() for p in parameters
    ]


def _relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    # Of all as one vector: some gradients (that of an attention's key bias) are zero but for rounding.
    assert [t.shape for t in found] == [t.shape for t in expected]
    one, other = (torch.cat([t.flatten() for t in tensors]) for tensors in (found, expected))
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("ranks", [thread_ranks, shm_ranks])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["mlp", "conv", "transformer"])
def test_equals_one_process_on_the_global_batch(
    name: str, world_size: int, ranks: Callable[..., list[Any]]
) -> None:
    alone = _train(name, lambda m: m, 0, 1, torch.float64)

    def run(group: dist.ProcessGroup) -> tuple[list[Tensor], list[Tensor]]:
        def wrap(model: nn.Module) -> nn.Module:
            return DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.001)

        return _train(name, wrap, group.rank(), group.size(), torch.float64)

    for gradients, weights in ranks(run, world_size):
        assert _relative_error(gradients, alone[0]) < 1e-6
        assert _relative_error(weights, alone[1]) < 1e-6


def _both_classes(name: str) -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    ours = _train(name, DistributedDataParallel, rank, size, torch.float32)
    theirs = _train(name, nn.parallel.DistributedDataParallel, rank, size, torch.float32)
    return all(
        torch.equal(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("name", ["mlp", "conv", "transformer"])
def test_equals_torchs_class_bit_for_bit_on_two_ranks(name: str) -> None:
    assert process_ranks(_both_classes, 2, name) == [True, True]
