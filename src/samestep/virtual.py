"""Virtual ranks: the V positions that define a run, who plays which, and which one is played now.

A run is defined by `virtual_size` = V and its seed, and played by W <= V processes. Each plays a contiguous
block of virtual ranks, one after the other in every step. What a virtual rank computes (its data, its random
numbers, the buffers it starts from) depends on the seed, the step and its number, never on who plays it.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from samestep.errors import WorldError
from samestep.random_streams import KeptStreams
from samestep.tree import Span, subtrees

__all__ = ["Turn", "VirtualRanks", "block_of", "virtual_ranks"]

_STREAMS_KEY = 0x7669_7274  # keeps these streams apart from others that are derived from the same seed
_MOST_TO_SEARCH = 256  # beyond it the search for the best cut takes longer than the cut saves


def block_of(rank: int, num_ranks: int, virtual_size: int) -> Span:
    """The virtual ranks that `rank` plays: blocks are contiguous, in order, and differ by one at most.

    The longer ones lie where the blocks then hold the fewest complete subtrees: those are communicated.

    Raises:
        WorldError: there are more ranks than virtual ranks.
    """
    if not 1 <= num_ranks <= virtual_size:
        raise WorldError(
            f"virtual_size={virtual_size} cannot be played by {num_ranks} processes: each plays at least one "
            f"virtual rank. Start at most {virtual_size}, or begin a run with a larger virtual_size"
        )
    return _blocks(num_ranks, virtual_size)[rank]


@dataclass(frozen=True)
class Turn:
    """One micro-batch of one virtual rank in one step."""

    position: int  # the virtual rank, 0..V-1
    step: tuple[int, ...]  # names the step in the run: whole numbers, equal whoever plays it
    micro_batch: int
    num_micro_batches: int  # of each virtual rank in this step
    weight: float  # what its mean counts for in the step's mean: 1 / num_micro_batches if all are equal
    is_first: bool  # of this process's turns in the step
    ends_virtual_rank: bool  # the last micro-batch of its virtual rank
    is_last: bool  # of this process's turns in the step: its backward makes the gradients the same


class VirtualRanks:
    """The virtual ranks of one process group, as one of its processes sees them.

    Args:
        rank: this process's.
        num_ranks: W, the number of processes.
        virtual_size: V; None: as many as there are processes, which then are what defines the run.
        seed: of the random streams; None leaves them alone.
        device: whose random stream is each virtual rank's own, beside torch's, numpy's and Python's.

    Raises:
        WorldError: there are more processes than virtual ranks.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        *,
        virtual_size: int | None = None,
        seed: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.is_fixed = virtual_size is not None  # asked for, so that results may not depend on num_ranks
        self.virtual_size = num_ranks if virtual_size is None else virtual_size
        self.rank = rank
        self.num_ranks = num_ranks
        self.block = block_of(rank, num_ranks, self.virtual_size)
        self.seed = seed
        self.device = device or torch.device("cpu")
        self._turn: Turn | None = None
        self._done: Turn | None = None  # the last one that was played to its end
        self._before: KeptStreams | None = None

    @property
    def current(self) -> Turn | None:
        """The turn being played, or None."""
        return self._turn

    @property
    def is_single(self) -> bool:
        """Whether this process plays one virtual rank only, so that it need not be said which."""
        return self.block.stop - self.block.start == 1

    def blocks(self) -> list[Span]:
        """Every process's block, in rank order."""
        return list(_blocks(self.num_ranks, self.virtual_size))

    @contextlib.contextmanager
    def play(
        self,
        position: int,
        step: int | tuple[int, ...],
        *,
        micro_batch: int = 0,
        num_micro_batches: int = 1,
        weight: float | None = None,
    ) -> Iterator[Turn]:
        """Virtual rank `position` is the current one; its random streams are those of this micro-batch.

        The streams before (torch's for the CPU and the device, numpy's, Python's) are put back at the end.
        A step is `num_micro_batches` of each virtual rank of the block in turn, in ascending order.

        Ranks: any, alone. The streams are the process's: ranks that are threads share them.

        Args:
            position: the virtual rank, of this process's block.
            step: names the step: whole numbers that no other step of the run has, from 0, such as
                (epoch, number of samples consumed before it). It is equal for all virtual ranks.
            micro_batch: its number within the virtual rank's, from 0.
            num_micro_batches: of each virtual rank in this step.
            weight: what this micro-batch's gradient counts for; default 1 / num_micro_batches. Over all
                virtual ranks and their micro-batches weights add up to V.

        Raises:
            WorldError: it is another virtual rank's turn: the step before was left in the middle.
        """
        key = (step,) if isinstance(step, int) else tuple(step)
        turn = self._next(position, key, micro_batch, num_micro_batches, weight)
        self._put_back()  # of a turn that was never ended: its generator is still held somewhere
        self._turn = turn
        if self.seed is not None:
            self._before = KeptStreams(self.device).keep()
            _seed(self.stream_of(turn), self.device)
        try:
            yield turn
        finally:
            if self._turn is turn:
                self._put_back()
                self._turn, self._done = None, turn

    def stream_of(self, turn: Turn) -> np.random.SeedSequence:
        """What this turn's random streams are derived from."""
        assert self.seed is not None
        key = (_STREAMS_KEY, *turn.step, turn.position, turn.micro_batch)
        return np.random.SeedSequence(self.seed, spawn_key=key)

    def leave_step(self) -> None:
        """The step that was begun will not be finished: the next turn may begin another one."""
        self._done = None

    def _next(
        self,
        position: int,
        step: tuple[int, ...],
        micro_batch: int,
        num_micro_batches: int,
        weight: float | None,
    ) -> Turn:
        start, stop = self.block
        is_first = position == start and micro_batch == 0
        done = self._turn or self._done
        here = f"process {self.rank} plays virtual ranks {start}..{stop - 1}"
        if is_first:
            expected = None if done is None or done.is_last else _after(done)
        else:
            expected = (start, 0) if done is None or done.is_last or done.step != step else _after(done)
        checked = self.is_fixed or not self.is_single
        if checked and expected is not None and expected != (position, micro_batch):
            left = done.step if done is not None else step
            raise WorldError(
                f"step {left} was left before its end: virtual rank {expected[0]}, micro-batch {expected[1]} "
                f"is next, and {here}. Run every batch of a step, or none"
            )
        if not start <= position < stop or not 0 <= micro_batch < num_micro_batches:
            raise WorldError(
                f"virtual rank {position}, micro-batch {micro_batch} of {num_micro_batches}: {here}"
            )
        ends = micro_batch == num_micro_batches - 1
        return Turn(
            position=position,
            step=step,
            micro_batch=micro_batch,
            num_micro_batches=num_micro_batches,
            weight=1.0 / num_micro_batches if weight is None else weight,
            is_first=is_first,
            ends_virtual_rank=ends,
            is_last=ends and position == stop - 1,
        )

    def _put_back(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.put_back()

    def __repr__(self) -> str:
        start, stop = self.block
        who = f"process {self.rank} of {self.num_ranks}"
        return f"VirtualRanks({start}..{stop - 1} of {self.virtual_size}, {who})"


# [Note: Which virtual ranks a group has] They are found by the group, which is what everything that
# communicates is given; ranks that are threads have groups of their own. The entry goes with the group.
_OF_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, VirtualRanks] = weakref.WeakKeyDictionary()
_OF_GROUP_LOCK = threading.Lock()


def virtual_ranks(group: dist.ProcessGroup, *, attach: VirtualRanks | None = None) -> VirtualRanks:
    """The virtual ranks of `group`: those of its `World`, else one per process.

    Ranks: any, alone.

    Args:
        group: the processes.
        attach: these are the group's from now on; it is `World` that says so, or a test.
    """
    with _OF_GROUP_LOCK:
        if attach is not None:
            _OF_GROUP[group] = attach
        found = _OF_GROUP.get(group)
        if found is None:
            found = _OF_GROUP[group] = VirtualRanks(group.rank(), group.size())
        return found


def _seed(sequence: np.random.SeedSequence, device: torch.device) -> None:
    words = [int(word) for word in sequence.generate_state(4, dtype=np.uint64)]
    random.seed(words[0])
    np.random.seed(words[1] % 2**32)
    torch.default_generator.manual_seed(words[2] >> 1)  # torch's seeds are signed
    if device.type != "cpu":
        _device_module(device).manual_seed(words[3] >> 1)  # of the current device, which is this rank's


def _device_module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _after(turn: Turn) -> tuple[int, int]:
    """(virtual rank, micro-batch) of the turn that follows."""
    if turn.ends_virtual_rank:
        return turn.position + 1, 0
    return turn.position, turn.micro_batch + 1


@lru_cache(maxsize=64)
def _blocks(num_ranks: int, virtual_size: int) -> tuple[Span, ...]:
    """Blocks of `length` or `length + 1`: the cut with the fewest subtrees, on its worst rank, then in all.

    A table over (ranks dealt with, longer blocks given out) of the best cut of what they cover.
    """
    length, num_longer = divmod(virtual_size, num_ranks)
    if virtual_size > _MOST_TO_SEARCH:
        return _spans([length + 1] * num_longer + [length] * (num_ranks - num_longer))
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for rank in range(num_ranks):
        following: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for given, (worst, total, lengths) in best.items():
            start = rank * length + given
            for longer in (1, 0):
                now = given + longer
                if not num_longer - (num_ranks - rank - 1) <= now <= num_longer:
                    continue
                stop = start + length + longer
                parts = len(subtrees(Span(start, stop), virtual_size))
                cut = (max(worst, parts), total + parts, (*lengths, stop - start))
                if now not in following or cut[:2] < following[now][:2]:
                    following[now] = cut
        best = following
    return _spans(best[num_longer][2])


def _spans(lengths: Sequence[int]) -> tuple[Span, ...]:
    stops = [0, *itertools.accumulate(lengths)]
    return tuple(Span(start, stop) for start, stop in itertools.pairwise(stops))
