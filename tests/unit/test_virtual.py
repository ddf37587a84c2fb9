"""Virtual ranks: blocks for every V and W, whose turn it is, and the streams that come and go with it."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import WorldError
from samestep.testing import thread_ranks
from samestep.tree import subtrees
from samestep.virtual import VirtualRanks, block_of, virtual_ranks


@pytest.mark.parametrize("virtual_size", range(1, 65))
def test_blocks_are_contiguous_and_differ_by_one(virtual_size: int) -> None:
    for num_ranks in range(1, virtual_size + 1):
        blocks = [block_of(rank, num_ranks, virtual_size) for rank in range(num_ranks)]
        assert [p for block in blocks for p in range(*block)] == list(range(virtual_size))
        lengths = {stop - start for start, stop in blocks}
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("virtual_size", "num_ranks"), [(8, 4), (8, 2), (4, 3), (6, 4), (7, 3), (5, 3), (6, 3)]
)
def test_blocks_are_complete_subtrees_where_they_can_be(virtual_size: int, num_ranks: int) -> None:
    for rank in range(num_ranks):
        assert len(subtrees(block_of(rank, num_ranks, virtual_size), virtual_size)) == 1


def test_many_virtual_ranks_are_dealt_at_once() -> None:
    assert block_of(0, 3000, 10_000) == (0, 4)
    assert block_of(2999, 3000, 10_000) == (9997, 10_000)


def test_more_processes_than_virtual_ranks_are_refused() -> None:
    with pytest.raises(WorldError, match="virtual_size=2 cannot be played by 3 processes"):
        VirtualRanks(0, 3, virtual_size=2)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def played(virtual: VirtualRanks, step: int | tuple[int, ...] = 7) -> dict[int, tuple[float, ...]]:
    found = {}
    for position in range(*virtual.block):
        with virtual.play(position, step):
            found[position] = draws()
    return found


@given(st.integers(1, 9), st.data())
def test_streams_do_not_depend_on_who_plays(virtual_size: int, data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, virtual_size))
    alone = played(VirtualRanks(0, 1, virtual_size=virtual_size, seed=3))
    together: dict[int, tuple[float, ...]] = {}
    for rank in range(num_ranks):
        together |= played(VirtualRanks(rank, num_ranks, virtual_size=virtual_size, seed=3))
    assert together == alone
    assert len({value for values in alone.values() for value in values}) == 3 * virtual_size


@pytest.mark.parametrize(
    "other",
    [
        lambda: played(VirtualRanks(0, 1, virtual_size=2, seed=4)),
        lambda: played(VirtualRanks(0, 1, virtual_size=2, seed=3), step=8),
        lambda: played(VirtualRanks(0, 1, virtual_size=2, seed=3), step=(7, 0)),
    ],
    ids=["seed", "step", "longer step"],
)
def test_streams_depend_on_seed_and_step(other: Callable[[], dict[int, tuple[float, ...]]]) -> None:
    mine = played(VirtualRanks(0, 1, virtual_size=2, seed=3))
    assert not {v for vs in mine.values() for v in vs} & {v for vs in other().values() for v in vs}


def test_surrounding_streams_are_put_back_also_after_an_exception() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    virtual = VirtualRanks(0, 1, virtual_size=2, seed=3)
    with pytest.raises(KeyError), virtual.play(0, 0):
        raise KeyError(draws())
    assert virtual.current is None
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]


def test_without_a_seed_streams_are_left_alone() -> None:
    state = torch.get_rng_state()
    with VirtualRanks(0, 1).play(0, 0):
        assert torch.equal(torch.get_rng_state(), state)


def test_turns_say_where_the_step_begins_and_ends() -> None:
    virtual = VirtualRanks(1, 2, virtual_size=4)
    facts = []
    for position in (2, 3):
        for micro_batch in (0, 1):
            with virtual.play(position, (0, 12), micro_batch=micro_batch, num_micro_batches=2) as turn:
                assert virtual.current is turn
                facts.append((turn.is_first, turn.ends_virtual_rank, turn.is_last, turn.weight))
    assert facts == [
        (True, False, False, 0.5),
        (False, True, False, 0.5),
        (False, False, False, 0.5),
        (False, True, True, 0.5),
    ]


def test_a_step_left_in_the_middle_is_seen_when_the_next_one_begins() -> None:
    virtual = VirtualRanks(0, 1, virtual_size=3)
    with virtual.play(0, 0):
        pass
    with pytest.raises(WorldError, match=r"step \(0,\) was left before its end: virtual rank 1"):
        virtual.play(0, 1).__enter__()
    virtual.leave_step()
    with virtual.play(0, 1):
        pass


def test_a_turn_out_of_order_is_refused() -> None:
    virtual = VirtualRanks(0, 2, virtual_size=4)
    with pytest.raises(WorldError, match="virtual rank 0"), virtual.play(1, 0):
        pass
    with pytest.raises(WorldError, match="virtual rank 2, micro-batch 0 of 1"):
        VirtualRanks(0, 4).play(2, 0).__enter__()


def test_a_turn_that_was_never_ended_gives_way_to_the_next() -> None:
    virtual = VirtualRanks(0, 1, virtual_size=2, seed=0)
    state = torch.get_rng_state()
    held = virtual.play(0, 0)
    held.__enter__()
    with virtual.play(1, 0):
        held.__exit__(None, None, None)
        assert virtual.current is not None
        assert virtual.current.position == 1
        assert not torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.get_rng_state(), state)


def test_each_group_has_its_own() -> None:
    def check(group: torch.distributed.ProcessGroup) -> tuple[int, bool, bool]:
        before = virtual_ranks(group)
        assert virtual_ranks(group) is before
        mine = VirtualRanks(group.rank(), 2, virtual_size=4)
        virtual_ranks(group, attach=mine)
        return virtual_ranks(group).block.start, before.is_fixed, virtual_ranks(group) is mine

    assert thread_ranks(check, 2) == [(0, False, True), (2, False, True)]
