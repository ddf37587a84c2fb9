"""Buffers of V virtual ranks: every one starts from the same, and the mean does not depend on who plays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep import DistributedDataParallel
from samestep.errors import GradientError
from samestep.tree import tree_sum
from samestep.virtual import VirtualRanks

from .test_virtual_gradients import BOTH, assert_equal_bits, play, turns
from .wrapping import numbers, seeded


class Normed(nn.Module):
    """BatchNorm, and buffers that nothing changes, with values of which a mean would not be exact."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.BatchNorm1d(3))
        self.register_buffer("mask", torch.tensor([0.1, float("-inf"), 1e-30, float("nan")]))
        self.register_buffer("table", torch.arange(5))
        self.register_buffer("wide", torch.full((2,), 1 / 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def batch(step: int, position: int) -> Tensor:
    return numbers(6, 4, seed=10 * step + position, dtype=torch.float32) * (1 + position)


def train(model: DistributedDataParallel, virtual: VirtualRanks) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        for position, _ in turns(virtual, step):
            model(batch(step, position)).square().mean().backward()
        found += [buffer.clone() for name, buffer in model.named_buffers() if "mask" not in name]
        optimizer.step()
        optimizer.zero_grad()
    start = seeded(Normed)
    assert torch.equal(model.module.mask.view(torch.int32), start.mask.view(torch.int32))
    assert torch.equal(model.module.wide, start.wide)
    return [*found, *(p.detach() for p in model.parameters())]


@BOTH
@pytest.mark.parametrize("virtual_size", [3, 4])
def test_equal_bits_whoever_plays(virtual_size: int, ranks: Callable[..., list[Any]]) -> None:
    assert_equal_bits(train, virtual_size, [2, 3], build=Normed, ranks=ranks)


def test_the_mean_is_that_of_models_that_each_saw_one_batch() -> None:
    def one_step(model: DistributedDataParallel, virtual: VirtualRanks) -> list[Tensor]:
        for position, _ in turns(virtual, 0):
            model(batch(0, position)).sum().backward()
        return [model.module.net[1].running_var, model.module.net[3].num_batches_tracked]

    found = assert_equal_bits(one_step, 3, [2], build=Normed)
    seen = []
    for position in range(3):
        model = seeded(Normed)
        model(batch(0, position))
        seen.append(model.net[1].running_var * (1 / 3))
    assert torch.equal(found[0], tree_sum(seen, torch.add))
    assert found[1].item() == 1


def test_a_filler_does_not_count() -> None:
    def one_step(model: DistributedDataParallel, virtual: VirtualRanks) -> list[Tensor]:
        for position in range(*virtual.block):
            with virtual.play(position, 0, weight=[2.0, 0.0][position]):
                model(batch(0, position)).sum().backward()
        return [model.module.net[1].running_mean]

    (found,) = assert_equal_bits(one_step, 2, [2], build=Normed)
    alone = seeded(Normed)
    alone(batch(0, 0))
    torch.testing.assert_close(found, alone.net[1].running_mean)


def test_evaluation_between_steps_leaves_buffers_alone() -> None:
    def run(model: DistributedDataParallel, virtual: VirtualRanks) -> list[Tensor]:
        for position, _ in turns(virtual, 0):
            model(batch(0, position)).sum().backward()
        model.zero_grad()
        before = [b.clone() for b in model.module.net.buffers()]
        model.eval()
        with torch.no_grad():
            outputs = model(batch(9, 9))
        model.train()
        assert all(torch.equal(a, b) for a, b in zip(before, model.module.net.buffers(), strict=True))
        return [outputs]

    assert_equal_bits(run, 4, [3], build=Normed)


def test_a_step_that_raised_leaves_the_buffers_of_the_step_before() -> None:
    def run(model: DistributedDataParallel, virtual: VirtualRanks) -> None:
        before = model.module.net[1].running_mean.clone()
        with virtual.play(0, 0):
            model(batch(0, 0))
        with virtual.play(1, 0):
            loss = model(batch(0, 1)).sum()
            with pytest.raises(GradientError, match="without a synchronised backward"):
                loss.backward()
        model._reducer.settle()
        assert torch.equal(model.module.net[1].running_mean, before)

    play(run, 2, 1, build=Normed)


def test_buffers_of_ones_own_are_refused() -> None:
    with pytest.raises(GradientError, match="forward_sync_buffers=False"):
        play(train, 2, 1, build=Normed, forward_sync_buffers=False)


def test_joining_is_refused() -> None:
    def run(model: DistributedDataParallel, virtual: VirtualRanks) -> None:
        with model.join():
            pass

    with pytest.raises(GradientError, match="join"):
        play(run, 2, 1)
