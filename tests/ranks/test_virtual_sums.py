"""Norms and means whose bits do not depend on buckets or processes."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import samestep
from samestep.errors import GradientError, WorldError
from samestep.reduction import TreeSum, mean_over_virtual_ranks, tree_sum_of
from samestep.testing import thread_ranks
from samestep.tree import tree_sum
from samestep.virtual import VirtualRanks, virtual_ranks

from .wrapping import numbers


def losses(virtual_size: int) -> list[Tensor]:
    return [numbers(2, seed=p, dtype=torch.float32) * 10.0**p for p in range(virtual_size)]


def mean(
    virtual_size: int, num_ranks: int, *, each: int = 1, weights: list[float] | None = None
) -> list[Tensor]:
    """On each rank, of `each` values per virtual rank."""

    def run(group: dist.ProcessGroup) -> Tensor:
        virtual = VirtualRanks(group.rank(), num_ranks, virtual_size=virtual_size)
        mine = slice(virtual.block.start * each, virtual.block.stop * each)
        values = losses(virtual_size * each)[mine]
        own = None if weights is None else weights[mine]
        return mean_over_virtual_ranks(TreeSum(group, virtual), virtual.block, values, own)

    return thread_ranks(run, num_ranks)


@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 0.0, 2.0, 5.0, 1.5, 1.0, 2.5]])
@pytest.mark.parametrize(("virtual_size", "each"), [(8, 1), (4, 2)])
def test_means_do_not_depend_on_processes(virtual_size: int, each: int, weights: list[float] | None) -> None:
    (alone,) = mean(virtual_size, 1, each=each, weights=weights)
    for num_ranks in (2, 3, 4):
        for found in mean(virtual_size, num_ranks, each=each, weights=weights):
            assert torch.equal(found, alone)
    scales = torch.tensor(weights or [1.0] * 8, dtype=torch.float64)[:, None]
    expected = (torch.stack(losses(8)).double() * scales).sum(0) / scales.sum()
    torch.testing.assert_close(alone, expected.float())


@pytest.mark.parametrize(
    ("values", "weights", "message"),
    [
        ([1.0, 2.0, 3.0], None, "3 values and 3 weights for 2 virtual ranks"),
        ([], None, "0 values"),
        ([1.0, 2.0], [1.0], "2 values and 1 weights"),
        ([1.0, 2.0], [0.0, 0.0], "all zero"),
    ],
)
def test_means_that_cannot_be(values: list[float], weights: list[float] | None, message: str) -> None:
    def run(group: dist.ProcessGroup) -> Any:
        virtual = VirtualRanks(0, 1, virtual_size=2)
        return mean_over_virtual_ranks(TreeSum(group, virtual), virtual.block, values, weights)

    with pytest.raises(WorldError, match=message):
        thread_ranks(run, 1)


def test_plain_numbers_have_a_mean_too() -> None:
    def run(group: dist.ProcessGroup) -> Tensor:
        virtual = VirtualRanks(group.rank(), 2)
        return mean_over_virtual_ranks(TreeSum(group, virtual), virtual.block, float(group.rank()))

    for found in thread_ranks(run, 2):
        assert found.item() == 0.5
        assert found.dtype == torch.float64


@pytest.mark.parametrize("length", range(1, 18))
def test_the_sum_of_a_tensors_items_is_the_trees(length: int) -> None:
    values = numbers(length, 3, dtype=torch.float32) * 1e3 ** torch.arange(3)
    assert torch.equal(tree_sum_of(values), tree_sum(list(values), operator.add))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_does_what_torchs_does(norm_type: float, max_norm: float) -> None:
    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 2), nn.Linear(1, 1))
        for index, parameter in enumerate(list(net.parameters())[:-1]):
            parameter.grad = numbers(*parameter.shape, seed=index, dtype=torch.float32)
        return net

    ours, theirs = model(), model()
    found = samestep.clip_grad_norm_(ours.parameters(), max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type)
    torch.testing.assert_close(found, expected)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_clipping_of_nothing_and_of_the_infinite() -> None:
    parameter = nn.Parameter(torch.ones(3))
    assert samestep.clip_grad_norm_([parameter], 1.0) == 0
    parameter.grad = torch.tensor([1.0, float("inf"), 0.0])
    with pytest.raises(RuntimeError, match="non-finite"):
        samestep.clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)


def test_clipping_sparse_gradients() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    assert samestep.clip_grad_norm_(table.parameters(), 1.0).item() == pytest.approx(10**0.5)
    assert table.weight.grad is not None
    torch.testing.assert_close(table.weight.grad.to_dense().norm(), torch.tensor(1.0))


def test_a_norm_over_slices_is_refused_with_virtual_ranks() -> None:
    def run(group: dist.ProcessGroup) -> None:
        virtual = VirtualRanks(group.rank(), 2, virtual_size=2)
        virtual_ranks(group, attach=virtual)
        model = samestep.DistributedDataParallel(nn.Linear(64, 64), process_group=group)
        optimizer = samestep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, stage=2)
        model(numbers(2, 64, dtype=torch.float32)).sum().backward()
        with pytest.raises(GradientError, match="stage=1"):
            optimizer.clip_grad_norm_(1.0)
        with pytest.raises(GradientError, match=r"optimizer.clip_grad_norm_\(\)"):
            samestep.clip_grad_norm_(model.parameters(), 1.0)

    thread_ranks(run, 2)
