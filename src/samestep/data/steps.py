"""A pass over an epoch: its steps, and in each the turns of this process's virtual ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from samestep.data.requests import Note
from samestep.errors import DataError
from samestep.virtual import VirtualRanks

__all__ = ["Delivery", "Pass", "Standing", "Step"]

# A micro-batch, its note, and the state of a stream after its step, if there is one.
Delivery = tuple[Any, Note, Any]


class Step:
    """One optimizer step: `for batch in step` gives this process's micro-batches, each as its virtual rank's.

    While the loop's body runs, its virtual rank is the current one: random numbers are that virtual rank's,
    and its gradient counts in the step's mean with the weight that its samples have in the global batch.
    """

    def __init__(self, here: Pass, first: Delivery) -> None:
        note = first[1]
        self.epoch = here.standing.epoch
        self.position = note.step  # samples of the epoch before this step
        self.num_samples = note.num_in_step  # of the global batch, all processes together
        self._note = note
        self._pass = here
        self._first: Delivery | None = first
        self._num_turns = len(range(*here.virtual.block)) * note.num_micro_batches
        self._num_taken = 0
        self._opened = False

    def __len__(self) -> int:
        """The number of micro-batches of this process."""
        return self._num_turns

    def __iter__(self) -> Iterator[Any]:
        if self._opened:
            raise DataError(
                f"{self._name()} is gone through a second time: its batches can be taken once, keep them if "
                "you need them again"
            )
        self._opened = True
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        virtual = self._pass.virtual
        while self._num_taken < self._num_turns:
            batch, note, state = self._next()
            turn = virtual.play(
                note.micro_batch.virtual_rank,
                (self.epoch, self.position),
                micro_batch=note.micro_batch.index,
                num_micro_batches=note.num_micro_batches,
                weight=note.num_counted * virtual.virtual_size / note.num_in_step,
            )
            with turn:
                self._take(state)
                yield batch
                del batch  # not two at a time

    def _next(self) -> Delivery:
        first, self._first = self._first, None
        return first or self._pass.delivery()

    def leave(self) -> None:
        """The loop goes on to the next step.

        Raises:
            DataError: it is in the middle of this one.
        """
        left = self._pass.standing.left
        if left is not None:
            raise DataError(f"{left}: go through all batches of a step, or none")
        while self._num_taken < self._num_turns:  # skipped as a whole
            *_, state = self._next()
            self._take(state)

    def _take(self, stream_state: Any) -> None:
        self._num_taken += 1
        standing = self._pass.standing
        if self._num_taken < self._num_turns:
            standing.left = (
                f"{self._name()} was left after {self._num_taken} of its {self._num_turns} batches here"
            )
            return
        standing.left = None
        standing.position = self.position + self._note.num_units
        standing.stream_state = stream_state
        standing.ended = self._note.num_units < self._pass.full_step  # only the last one is short

    def _name(self) -> str:
        return f"the step at sample {self.position} of epoch {self.epoch}"

    def __repr__(self) -> str:
        taken = f"{self._num_taken} of {self._num_turns} batches taken"
        return f"Step(epoch={self.epoch}, position={self.position}, {taken})"


@dataclass
class Standing:
    """How far a pass has come: what its loader remembers of it, without what has been read ahead."""

    epoch: int
    position: int  # where the next step begins: all units before it were taken
    stream_state: Any = None
    left: str | None = None  # which step is in its middle, in words
    ended: bool = False  # nothing is left


class Pass:
    """An iteration over an epoch, or over what is left of it.

    Memory: what has been read ahead, and the workers that do so, are gone when nothing refers to the pass and
    its steps any more.
    """

    def __init__(
        self, standing: Standing, deliveries: Iterator[Delivery], virtual: VirtualRanks, *, full_step: int
    ) -> None:
        self.standing = standing
        self.virtual = virtual
        self.full_step = full_step  # units of a step that is not short
        self._deliveries = deliveries

    def next_step(self) -> Step | None:
        """The next step, once the one before was left; None after the last one."""
        first = next(self._deliveries, None)
        if first is None:
            self.standing.ended = True
            return None
        return Step(self, first)  # which is not kept here: it keeps this pass, and what it has read ahead

    def delivery(self) -> Delivery:
        """The next micro-batch of a step that has begun."""
        return next(self._deliveries)
