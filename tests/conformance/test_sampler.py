"""Torch's DistributedSampler beside ours: the same signature, lengths, counts and, unshuffled, indices."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from samestep.data import DistributedSampler
from samestep.testing import process_ranks, thread_ranks

SIZES = [(n, w) for w in (1, 2, 3, 4, 7, 8) for n in (1, 2, 3, 7, 8, 9, 16, 23, 64, 100) if n >= w]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("length", "num_replicas"), SIZES)
def test_lengths_counts_and_unshuffled_indices(length: int, num_replicas: int, drop_last: bool) -> None:
    counts: Counter[int] = Counter()
    for rank in range(num_replicas):
        arguments = (range(length), num_replicas, rank, False, 0, drop_last)
        theirs: TorchSampler[int] = TorchSampler(*arguments)  # type: ignore[arg-type]
        ours = DistributedSampler(*arguments)
        assert list(ours) == list(theirs)
        assert (len(ours), ours.num_samples, ours.total_size) == (
            len(theirs),
            theirs.num_samples,
            theirs.total_size,
        )
        shuffled = list(DistributedSampler(range(length), num_replicas, rank, True, 5, drop_last))
        assert len(shuffled) == len(theirs)
        counts.update(shuffled)
    theirs_counts: Counter[int] = Counter()
    for rank in range(num_replicas):
        theirs_counts.update(TorchSampler(range(length), num_replicas, rank, True, 5, drop_last))  # type: ignore[arg-type]
    assert sorted(counts.values()) == sorted(theirs_counts.values())


def test_torchs_parameters_come_first_and_in_its_order() -> None:
    theirs = inspect.signature(TorchSampler).parameters
    ours = inspect.signature(DistributedSampler).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert [ours[name].default for name in theirs] == [theirs[name].default for name in theirs]
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in set(ours) - set(theirs))


def test_it_is_a_sampler_and_batches_like_one() -> None:
    ours = DistributedSampler(range(10), 2, 1, shuffle=False)
    theirs: TorchSampler[int] = TorchSampler(range(10), 2, 1, shuffle=False)  # type: ignore[arg-type]
    assert isinstance(ours, Sampler)
    assert list(BatchSampler(ours, 2, False)) == list(BatchSampler(theirs, 2, False))
    assert len(DataLoader(list(range(10)), 2, sampler=ours)) == 3
    for name in ("dataset", "num_replicas", "rank", "epoch", "drop_last", "shuffle", "seed"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_the_groups_rank_and_size_are_the_default() -> None:
    def share(group: dist.ProcessGroup) -> list[int]:
        return list(DistributedSampler(range(6), shuffle=False, process_group=group))

    assert thread_ranks(share, 3) == [[0, 3], [1, 4], [2, 5]]


def _share_of_the_world() -> tuple[list[int], list[int]]:
    ours = DistributedSampler(range(6), shuffle=False)
    theirs: TorchSampler[int] = TorchSampler(range(6), shuffle=False)  # type: ignore[arg-type]
    return list(ours), list(theirs)


def test_the_worlds_rank_and_size_are_the_default() -> None:
    assert process_ranks(_share_of_the_world, 2) == [([0, 2, 4], [0, 2, 4]), ([1, 3, 5], [1, 3, 5])]
