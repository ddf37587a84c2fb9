"""A pass over an epoch: its steps, and in each the turns of this process's virtual ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samestep.data.requests import Note
from samestep.errors import DataError
from samestep.virtual import VirtualRanks

__all__ = ["Delivery", "Pass", "Step"]

# A micro-batch, its note, and the state of a stream after its step, if there is one.
Delivery = tuple[Any, Note, Any]


class Step:
    """One optimizer step: `for batch in step` gives this process's micro-batches, each as its virtual rank's.

    While the loop's body runs, its virtual rank is the current one: random numbers are that virtual rank's,
    and its gradient counts in the step's mean with the weight that its samples have in the global batch.
    """

    def __init__(self, here: Pass, first: Delivery) -> None:
        note = first[1]
        self.epoch = here.epoch
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
                self._num_taken += 1
                if self._num_taken == self._num_turns:
                    self._pass.finish(self._note, state)
                yield batch
                del batch  # not two at a time

    def _next(self) -> Delivery:
        first, self._first = self._first, None
        return first or self._pass.delivery()

    @property
    def is_open(self) -> bool:
        """Whether some of its micro-batches were taken and others were not."""
        return 0 < self._num_taken < self._num_turns

    def leave(self) -> None:
        """The loop goes on to the next step.

        Raises:
            DataError: it is in the middle of this one.
        """
        if self.is_open:
            raise DataError(f"{self.left_in_the_middle()}: go through all batches of a step, or none")
        while self._num_taken < self._num_turns:  # skipped as a whole
            *_, state = self._next()
            self._num_taken += 1
            if self._num_taken == self._num_turns:
                self._pass.finish(self._note, state)

    def left_in_the_middle(self) -> str:
        """What happened, for messages."""
        return f"{self._name()} was left after {self._num_taken} of its {self._num_turns} batches here"

    def _name(self) -> str:
        return f"the step at sample {self.position} of epoch {self.epoch}"

    def __repr__(self) -> str:
        taken = f"{self._num_taken} of {self._num_turns} batches taken"
        return f"Step(epoch={self.epoch}, position={self.position}, {taken})"


class Pass:
    """An iteration over an epoch, or over what is left of it from unit `start`."""

    def __init__(
        self,
        epoch: int,
        start: int,
        deliveries: Iterator[Delivery],
        virtual: VirtualRanks,
        *,
        full_step: int,
    ) -> None:
        self.epoch = epoch
        self.virtual = virtual
        self.position = start  # where the next step begins: all units before it were taken
        self.stream_state: Any = None
        self.step: Step | None = None
        self.ended = False  # nothing is left
        self._deliveries = deliveries
        self._full_step = full_step  # units of a step that is not short

    def next_step(self) -> Step | None:
        """The next step; None after the last one.

        Raises:
            DataError: the step before was left in the middle.
        """
        if self.step is not None:
            self.step.leave()
        first = next(self._deliveries, None)
        if first is None:
            self.ended = True
            return None
        self.step = Step(self, first)
        return self.step

    def delivery(self) -> Delivery:
        """The next micro-batch of a step that has begun."""
        return next(self._deliveries)

    def finish(self, note: Note, stream_state: Any) -> None:
        """All micro-batches of a step were taken."""
        self.position = note.step + note.num_units
        self.stream_state = stream_state
        self.ended = note.num_units < self._full_step  # only the last one is short
