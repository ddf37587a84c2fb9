"""Sums along the tree: the bits of `tree_sum` over the virtual ranks' values, whoever holds them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from samestep.reduction import TreeSum
from samestep.testing import thread_ranks
from samestep.tree import PartialSums, Span, tree_sum
from samestep.virtual import VirtualRanks

from .test_shm import shm_ranks

BOTH = pytest.mark.parametrize("ranks", [thread_ranks, shm_ranks], ids=["gloo", "shm"])
SIZES = [(1, 1), (4, 1), (2, 2), (3, 3), (4, 4), (4, 2), (8, 2), (6, 2), (5, 2), (4, 3), (8, 3), (9, 4)]


def value(position: int, index: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Numbers of widely different sizes, so that another order of adding them shows."""
    generator = torch.Generator().manual_seed(100 * index + position)
    return (torch.randn(numel, generator=generator) * 10.0 ** (position % 5)).to(dtype)


def expected(virtual_size: int, index: int, numel: int, dtype: torch.dtype) -> Tensor:
    return tree_sum([value(p, index, numel, dtype) for p in range(virtual_size)], operator.add)


def parts_of(block: Span, virtual_size: int, index: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    sums: PartialSums[Tensor] = PartialSums(block, virtual_size, operator.add)
    for position in range(*block):
        sums.push(value(position, index, numel, dtype))
    return list(sums.parts().values())


@BOTH
@pytest.mark.parametrize(("virtual_size", "num_ranks"), SIZES)
def test_sums_have_the_bits_of_the_tree(
    virtual_size: int, num_ranks: int, ranks: Callable[..., list[Any]]
) -> None:
    numels = [1, 77, 5000, 40_000, 12_345]
    dtypes = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float32]

    def run(group: dist.ProcessGroup) -> list[Tensor]:
        virtual = VirtualRanks(group.rank(), num_ranks, virtual_size=virtual_size)
        tree = TreeSum(group, virtual)
        for _ in range(2):  # the second time with scratch memory that was used before
            pending = []
            for index, (numel, dtype) in enumerate(zip(numels, dtypes, strict=True)):
                # The last sum has the length that is sent as it is, and its result lies in its last part.
                length = tree.padded(numel) if index == 4 else numel
                parts = parts_of(virtual.block, virtual_size, index, length, dtype)
                out = parts[-1] if index == 4 else torch.empty(length, dtype=dtype)
                pending.append(tree.start(parts, out))
            for one in pending:
                one.wait()
        return [one.out for one in pending]

    for found in ranks(run, num_ranks):
        for index, (total, dtype) in enumerate(zip(found, dtypes, strict=True)):
            assert torch.equal(total, expected(virtual_size, index, total.numel(), dtype)), index


def test_a_plain_all_reduce_has_other_bits() -> None:
    """The negative control: Gloo's own sum over four ranks is not the tree's."""

    def run(group: dist.ProcessGroup) -> Tensor:
        total = value(group.rank(), 0, 10_000, torch.float32)
        group.allreduce([total]).wait()
        return total

    (found, *_) = thread_ranks(run, 4)
    assert not torch.equal(found, expected(4, 0, 10_000, torch.float32))


def test_shm_sums_where_its_ranks_follow_the_tree() -> None:
    def run(group: dist.ProcessGroup) -> list[bool]:
        sizes = [4, 8, 6, 5] if group.size() == 2 else [3, 6, 12, 4, 9]
        found = []
        for virtual_size in sizes:
            virtual = VirtualRanks(group.rank(), group.size(), virtual_size=virtual_size)
            found.append(TreeSum(group, virtual).is_all_reduce)
        return found

    assert shm_ranks(run, 2)[0] == [True, True, False, False]
    assert shm_ranks(run, 3)[0] == [True, True, True, False, False]
    assert thread_ranks(run, 2)[0] == [False] * 4
