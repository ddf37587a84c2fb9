"""Reduce-scatter and all-gather in slices of one tensor, over Gloo and in shared memory."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from samestep import collectives
from samestep.errors import CollectiveError
from samestep.testing import thread_ranks
from samestep.tree import tree_sum

from .test_shm import drawn, shm_ranks

CUTS = {1: [0, 1000], 2: [0, 64, 1000], 3: [0, 0, 640, 1000], 4: [0, 500, 500, 999, 1000]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [thread_ranks, shm_ranks])
def test_slices_are_summed_along_the_tree_and_gathered(ranks, size, dtype):
    cuts = CUTS[size]
    expected = tree_sum([drawn(1000, dtype, seed) for seed in range(size)], torch.add)

    def rank_main(group: dist.ProcessGroup) -> torch.Tensor:
        flat = collectives.empty_for_reduction(1000, dtype, torch.device("cpu"), group)
        flat.copy_(drawn(1000, dtype, group.rank()))
        collectives.reduce_slices(flat, cuts, group).wait()
        own = slice(cuts[group.rank()], cuts[group.rank() + 1])
        assert torch.equal(flat[own], expected[own])
        collectives.gather_slices(flat, cuts, group).wait()
        return flat.clone()

    for found in ranks(rank_main, size):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("ranks", [thread_ranks, shm_ranks])
def test_several_are_under_way_at_once(ranks):
    def rank_main(group: dist.ProcessGroup) -> list[torch.Tensor]:
        flats = [
            collectives.empty_for_reduction(300_000, torch.float32, torch.device("cpu"), group).fill_(i + 1)
            for i in range(5)
        ]
        cuts = [0, 100_000, 200_000, 300_000]
        works = [collectives.reduce_slices(flat, cuts, group) for flat in flats]
        total = torch.ones(3)
        collectives.all_reduce(total, group).wait()
        for work in works:
            work.wait()
        for work in [collectives.gather_slices(flat, cuts, group) for flat in flats]:
            work.wait()
        return [flat.unique() for flat in flats]

    for found in ranks(rank_main, 3):
        assert [values.tolist() for values in found] == [[3.0 * (i + 1)] for i in range(5)]


def test_private_tensors_and_other_cuts_are_refused():
    def rank_main(group: dist.ProcessGroup) -> str:
        shared = collectives.empty_for_reduction(10, torch.float32, torch.device("cpu"), group)
        flat = torch.zeros(10) if group.rank() == 1 else shared
        with pytest.raises(CollectiveError) as caught:
            collectives.reduce_slices(flat, [0, 5, 10], group).wait()
        return str(caught.value)

    for message in shm_ranks(rank_main, 2):
        assert "that of rank 1" in message
        assert "not from empty_shared()" in message

    def differing(group: dist.ProcessGroup) -> str:
        flat = collectives.empty_for_reduction(10, torch.float32, torch.device("cpu"), group)
        with pytest.raises(CollectiveError) as caught:
            collectives.gather_slices(flat, [0, 5 + group.rank(), 10], group).wait()
        return str(caught.value)

    for message, other in itertools.pairwise(shm_ranks(differing, 2)):
        assert "cut at [0, 5, 10]" in message
        assert "cut at [0, 6, 10]" in other
