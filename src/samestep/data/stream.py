"""Iterable data sets: samples that only come one after the other, so that position is all they have.

[Note: Streams] Every process, and every loader worker in it, goes through a copy of the whole stream and
keeps what is its own: sample p of the stream is unit p of the epoch, dealt as everything is. So the stream
must be the same in every copy: its random streams begin anew at each step, from (seed, epoch, position), and
`get_worker_info()` says None inside it, so that it does not share itself out among the workers. What is
costly belongs in `collate_fn`, which runs for a micro-batch only where that is wanted.

A step is read as a whole before its micro-batches are served, because only its end says how many it has. So
after each step `dataset.state_dict()`, if there is one, says where the next one begins; it travels with the
step's last micro-batch to the main process. Without it, a run resumes by reading up to where it stood.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from samestep.data.keyed import key_of
from samestep.data.plan import MicroBatch, StepPlan, StepShape
from samestep.data.requests import Note, Request
from samestep.data.streams import start_streams

__all__ = ["Arrived", "StreamCollate", "StreamReader", "StreamSource", "StreamState", "Ticket"]


@dataclass(frozen=True)
class Ticket:
    """A micro-batch that is asked for: it may turn out not to exist."""

    epoch: int
    step: int  # the position at which its step begins
    virtual_rank: int
    index: int


class Arrived(NamedTuple):
    """A micro-batch that was loaded, or word that it does not exist (`batch` is None, and so is its note)."""

    batch: Any
    note: Note | None
    ended: bool  # the stream ends before this step
    state: Any  # the data set's at the end of the step, with its last micro-batch


@dataclass(frozen=True)
class StreamState:
    """Where a data set that has a state may go on."""

    epoch: int
    position: int
    state: Any


class StreamSource:
    """A loader's requests for a stream: tickets without end, until one comes back empty."""

    def __init__(self, shape: StepShape, block: range, length: int | None) -> None:
        self.length = length
        self._shape = shape
        self._block = block

    def facts(self) -> dict[str, Any]:
        return {"num_units": self.length, "order": "by the stream"}

    def requests(self, epoch: int, start: int) -> Iterator[Request]:
        step = start
        while True:
            for virtual_rank in self._block:
                for index in range(self._shape.accumulation):
                    yield [Ticket(epoch, step, virtual_rank, index)], None
            step += self._shape.num_units


class StreamReader:
    """The map-style data set that torch's loader sees in place of the stream; each worker has a copy."""

    def __init__(
        self, dataset: Any, shape: StepShape, block: range, seed: int, resume: StreamState | None
    ) -> None:
        self.dataset = dataset
        self._resume = resume
        self._shape = shape
        self._block = block
        self._seed = seed
        self._epoch: int | None = None
        self._units: Iterator[Any] = iter(())
        self._step = self._position = -1  # where the step that was read began, and the stream stands now
        self._read: list[Any] = []

    def __getitems__(self, tickets: list[Ticket]) -> tuple[list[Any], Arrived]:
        """The samples of one micro-batch, and all that is known of it but the batch to be made of them."""
        (ticket,) = tickets
        if (ticket.epoch, ticket.step) != (self._epoch, self._step):
            self._read_step(ticket)
        plan = self._shape.plan(len(self._read))
        micro_batch = None if plan is None else _micro_batch(plan, ticket)
        if plan is None or micro_batch is None:
            return [], Arrived(None, None, ended=plan is None, state=None)
        samples = [self._read[offset % plan.num_units] for offset in micro_batch.offsets]
        start_streams(self._key(ticket.epoch, ticket.step), 1 + ticket.virtual_rank * 2**20 + ticket.index)
        note = Note(
            step=ticket.step,
            num_units=plan.num_units,
            micro_batch=micro_batch,
            num_micro_batches=plan.num_micro_batches,
            num_counted=micro_batch.num_counted,
            num_in_step=plan.num_dealt,
        )
        return samples, Arrived(None, note, ended=False, state=self._state_after(micro_batch, plan))

    def _state_after(self, micro_batch: MicroBatch, plan: StepPlan) -> Any:
        is_last = micro_batch.virtual_rank == self._block[-1]
        is_last = is_last and micro_batch.index == plan.num_micro_batches - 1
        if not is_last or not callable(getattr(self.dataset, "state_dict", None)):
            return None
        with _whole_stream():
            return copy.deepcopy(self.dataset.state_dict())

    def _read_step(self, ticket: Ticket) -> None:
        if ticket.epoch != self._epoch or ticket.step < self._position:
            self._begin(ticket)
        while self._position < ticket.step:
            wanted = min(self._shape.num_units, ticket.step - self._position)
            if len(self._take(wanted)) < wanted:
                self._position = ticket.step  # the stream is shorter now: nothing comes any more
        self._read = self._take(self._shape.num_units)
        self._step = ticket.step

    def _begin(self, ticket: Ticket) -> None:
        self._epoch, self._position = ticket.epoch, 0
        resume = self._resume
        with _whole_stream():
            start_streams(self._key(ticket.epoch, 0), 0)
            set_epoch = getattr(self.dataset, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(ticket.epoch)
            if resume is not None and resume.epoch == ticket.epoch and resume.position <= ticket.step:
                self.dataset.load_state_dict(copy.deepcopy(resume.state))
                self._position = resume.position
            self._units = iter(self.dataset)

    def _take(self, number: int) -> list[Any]:
        assert self._epoch is not None
        start_streams(self._key(self._epoch, self._position), 0)
        with _whole_stream():
            units = list(islice(self._units, number))
        self._position += len(units)
        return units

    def _key(self, epoch: int, position: int) -> int:
        return key_of("stream", self._seed, epoch, position)


def _micro_batch(plan: StepPlan, ticket: Ticket) -> MicroBatch | None:
    ranks = range(ticket.virtual_rank, ticket.virtual_rank + 1)
    return next((m for m in plan.micro_batches(ranks) if m.index == ticket.index), None)


@dataclass(frozen=True)
class StreamCollate:
    """Makes the batch of samples that `StreamReader` gave, if there are any."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, loaded: tuple[list[Any], Arrived]) -> Arrived:
        samples, arrived = loaded
        return arrived._replace(batch=self.collate(samples)) if samples else arrived


@contextlib.contextmanager
def _whole_stream() -> Iterator[None]:
    """`get_worker_info()` is None, as in the main process: the loader shares the stream out, not the set."""
    info = get_worker_info()
    if info is None:
        yield
        return
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
