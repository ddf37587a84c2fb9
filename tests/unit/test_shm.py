"""The pure parts of the backend "shm": layout, labels, slices, and the steps of a reduction."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import CollectiveError
from samestep.shm.allreduce import slice_of
from samestep.shm.exchange import Label, pieces
from samestep.shm.reduce import Reduction, reduction
from samestep.shm.region import CACHE_LINE, Layout, Segment
from samestep.tree import tree_sum


@given(st.integers(1, 300), st.sampled_from([16 * 1024, 64 * 1024, 2**20]))
def test_nothing_in_a_segment_overlaps(num_ranks, stage_bytes):
    layout = Layout(num_ranks, stage_bytes)
    words = [(place, place + 8) for place in (layout.TOKEN, layout.STATE, layout.ALARM)]
    words += [(place, place + CACHE_LINE) for place in (layout.ASLEEP, layout.FINISHED)]
    places = [
        *words,
        (layout.REPORT, layout.REPORT + layout.REPORT_BYTES),
        *((layout.slot(n), layout.slot(n) + layout.SLOT_BYTES) for n in range(layout.NUM_SLOTS)),
        *(
            (layout.lane(peer), layout.lane(peer) + layout.LANE_HEAD_BYTES + layout.lane_bytes)
            for peer in range(num_ranks)
        ),
        *((layout.stage(n), layout.stage(n) + stage_bytes) for n in range(layout.NUM_STAGES)),
    ]
    for (_, stop), (start, _) in itertools.pairwise(places):
        assert stop <= start
    assert places[-1][1] == layout.num_bytes
    starts = [start for start, _ in places if start != layout.ALARM]
    assert all(start % CACHE_LINE == 0 for start in starts)


def test_segments_stay_bounded_with_many_ranks():
    assert Layout(2, 2**20).num_bytes < 5 * 2**20
    assert Layout(64, 2**20).num_bytes < 5 * 2**20


def test_a_slot_is_used_again_after_all_others():
    layout = Layout(2, 16 * 1024)
    slots = [layout.slot(n) for n in range(layout.NUM_SLOTS + 1)]
    assert len(set(slots)) == layout.NUM_SLOTS
    assert slots[0] == slots[-1]


@given(st.text(max_size=300), st.text(max_size=300))
def test_labels_differ_exactly_when_their_texts_do(one, other):
    first, second = Label.of(one), Label.of(other)
    assert (first.digest == second.digest) == (one == other)
    assert len(first.encoded) == len(second.encoded) == Layout.SLOT_BYTES - 2 * CACHE_LINE
    assert 0 <= first.digest < 2**63


@given(st.integers(0, 10_000), st.integers(1, 3000))
def test_pieces_cover_everything_once(numel, length):
    cuts = list(pieces(numel, length))
    assert [i for start, stop in cuts for i in range(start, stop)] == list(range(numel))
    assert all(stop - start <= length for start, stop in cuts)
    assert len(cuts) >= 1


@given(
    st.integers(0, 5000), st.integers(1, 70), st.sampled_from([torch.uint8, torch.float32, torch.complex128])
)
def test_slices_cover_everything_once_in_whole_cache_lines(numel, num_ranks, dtype):
    slices = [slice_of(rank, num_ranks, numel, dtype) for rank in range(num_ranks)]
    assert [i for start, stop in slices for i in range(start, stop)] == list(range(numel))
    assert all(start * dtype.itemsize % CACHE_LINE == 0 for start, stop in slices if start < stop)


@given(st.integers(1, 40), st.integers(0, 39))
def test_a_reduction_adds_along_the_tree_and_may_write_over_an_operand(num_ranks, place):
    generator = torch.Generator().manual_seed(num_ranks)
    operands = [torch.randn(5, generator=generator) * 1000 for _ in range(num_ranks)]
    expected = tree_sum(operands, torch.add)
    reducing = reduction("SUM", torch.float32, num_ranks)
    scratch = [torch.empty(5) for _ in range(reducing.num_scratch)]
    kept = [operand.clone() for operand in operands]
    out = operands[place % num_ranks]
    reducing.into(out, operands, scratch)
    assert torch.equal(out, expected)
    for rank, (operand, before) in enumerate(zip(operands, kept, strict=True)):
        assert rank == place % num_ranks or torch.equal(operand, before)


@given(st.integers(2, 300))
def test_scratch_grows_with_the_depth_of_the_tree_only(num_ranks):
    assert reduction("SUM", torch.float32, num_ranks).num_scratch <= num_ranks.bit_length()


def test_what_torch_cannot_compute_is_said():
    with pytest.raises(CollectiveError, match=r"torch cannot compute MAX of torch\.complex64"):
        Reduction("MAX", torch.complex64, 2)
    with pytest.raises(CollectiveError, match=r"torch cannot compute AVG of torch\.bool"):
        Reduction("AVG", torch.bool, 2)


def test_a_segment_is_shared_with_whoever_attaches_it_and_has_no_name():
    mine = Segment.create(8192)
    other = Segment.attach(os.getpid(), mine.fd, 8192)
    mine.tensor(torch.float32, 4096, 3).copy_(torch.tensor([1.0, 2.0, 3.0]))
    other.words[5] = 7
    assert other.tensor(torch.float32, 4096, 3).tolist() == [1.0, 2.0, 3.0]
    assert mine.words[5] == 7
    mine.close()
    assert other.tensor(torch.float32, 4096, 3).tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(OSError, match="No such file"):
        Segment.attach(os.getpid(), 1_000_000, 8192)
