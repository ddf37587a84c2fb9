"""What torch's loader is asked to load: this process's micro-batches of every step of an epoch, in turn.

A source turns (epoch, position to start at) into requests, one per micro-batch. Torch draws them ahead of the
training loop; the notes about them wait in a queue until the micro-batches arrive, in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch

from samestep.data.keyed import key_of
from samestep.data.orders import Orders
from samestep.data.plan import MicroBatch, StepPlan, StepShape
from samestep.data.streams import SampleIndices, start_streams
from samestep.random_streams import KeptStreams

__all__ = ["Note", "Request", "RequestQueue", "SamplerSource", "Source", "StoredSource", "sample_key"]

_BLOCK_LENGTH = 4096  # indices made at a time: enough to hide numpy's call overhead
_BITS_IN_BATCH = 20  # the number of a sample in a batch of a batch sampler, in the number of its streams


@dataclass(frozen=True)
class Note:
    """What is known of a micro-batch beside its data."""

    step: int  # the position at which its step begins
    num_units: int  # of the step: where the next one begins
    micro_batch: MicroBatch
    num_micro_batches: int  # of each virtual rank in this step
    num_counted: int  # samples of this micro-batch that count in the step's mean
    num_in_step: int  # and of all together


# What torch's fetcher is given, and the note; no note yet if only the stream itself can tell.
Request = tuple[Any, Note | None]


class Source(Protocol):
    """Where a loader's requests come from."""

    @property
    def length(self) -> int | None:
        """Units in an epoch, if that is known."""
        ...

    def requests(self, epoch: int, start: int) -> Iterator[Request]:
        """This process's requests, from the step that begins at unit `start` of the epoch."""
        ...

    def facts(self) -> dict[str, Any]:
        """What must be equal in a run that continues another, as JSON can hold it."""
        ...


def sample_key(seed: int, epoch: int) -> int:
    """The key of the samples' random streams of one epoch."""
    return key_of("sample streams", seed, epoch)


class StoredSource:
    """Samples by index, in an order that can be computed at any position."""

    def __init__(self, orders: Orders, shape: StepShape, block: range, seed: int) -> None:
        self._orders = orders
        self._shape = shape
        self._block = block
        self._seed = seed

    @property
    def length(self) -> int | None:
        return self._orders.length

    def facts(self) -> dict[str, Any]:
        return {"num_units": self._orders.length, **self._orders.facts()}

    def requests(self, epoch: int, start: int) -> Iterator[Request]:
        order = self._orders.of(epoch)
        key = sample_key(self._seed, epoch)
        for notes in _blocks(self._notes(start)):
            positions = np.concatenate([_positions(note) for note in notes])
            indices = order(positions).tolist()
            numbers = positions.tolist() if self._orders.repeats else indices
            first = 0
            for note in notes:
                last = first + len(note.micro_batch.offsets)
                yield SampleIndices(indices[first:last], numbers[first:last], key), note
                first = last

    def _notes(self, start: int) -> Iterator[Note]:
        step = start
        while plan := self._shape.plan(self._orders.length - step):
            for micro_batch in plan.micro_batches(self._block):
                yield _note(step, plan, micro_batch, micro_batch.num_counted, plan.num_dealt)
            step += plan.num_units


def _note(step: int, plan: StepPlan, micro_batch: MicroBatch, num_counted: int, num_in_step: int) -> Note:
    return Note(step, plan.num_units, micro_batch, plan.num_micro_batches, num_counted, num_in_step)


def _positions(note: Note) -> np.ndarray[Any, np.dtype[np.uint64]]:
    offsets = note.micro_batch.offsets
    positions = np.arange(offsets.start, offsets.stop, offsets.step, dtype=np.uint64)
    positions %= np.uint64(note.num_units)  # where it is padded
    positions += np.uint64(note.step)
    return positions


def _blocks(notes: Iterator[Note]) -> Iterator[list[Note]]:
    """`notes` in lists that are worth one call of the order."""
    block: list[Note] = []
    length = 0
    for note in notes:
        block.append(note)
        length += len(note.micro_batch.offsets)
        if length >= _BLOCK_LENGTH:
            yield block
            block, length = [], 0
    if block:
        yield block


class SamplerSource:
    """Samples, or batches of them, that the script's own sampler names one after the other.

    Every process goes through the whole sequence and takes its own from it, so the sequence must be the same
    everywhere: what a sampler draws (from torch, numpy, `random` or a torch generator of its own) comes from
    streams that begin anew each epoch, from (seed, epoch).
    """

    def __init__(
        self, sampler: Iterable[Any], shape: StepShape, block: range, seed: int, *, batches: bool
    ) -> None:
        self._sampler = sampler
        self._shape = shape
        self._block = block
        self._seed = seed
        self._batches = batches
        # A generator's first seed is the script's choice; torch forgets it when it is seeded anew.
        self._generators = [(g, g.initial_seed()) for g in _generators_of(sampler)]

    @property
    def length(self) -> int | None:
        try:
            return len(self._sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    def facts(self) -> dict[str, Any]:
        return {"num_units": self.length, "order": f"by {type(self._sampler).__name__}"}

    def requests(self, epoch: int, start: int) -> Iterator[Request]:
        key = sample_key(self._seed, epoch)
        units = self._begin(epoch)
        units.skip(start)
        step = start
        while plan := self._shape.plan(len(taken := units.take(self._shape.num_units))):
            counts = [len(unit) if self._batches else 1 for unit in taken]
            num_in_step = sum(counts[offset % plan.num_units] for offset in range(plan.num_dealt))
            for micro_batch in plan.micro_batches(self._block):
                offsets = [offset % plan.num_units for offset in micro_batch.offsets]
                num_counted = sum(counts[o] for o in offsets) if micro_batch.num_counted else 0
                indices, numbers = self._samples(taken, step, offsets)
                note = _note(step, plan, micro_batch, num_counted, num_in_step)
                yield SampleIndices(indices, numbers, key), note
            step += plan.num_units

    def _samples(self, taken: Sequence[Any], step: int, offsets: list[int]) -> tuple[list[int], list[int]]:
        """The indices in these units, and the numbers of their streams: an index may come repeatedly."""
        if not self._batches:
            return [taken[offset] for offset in offsets], [step + offset for offset in offsets]
        (offset,) = offsets
        indices = list(taken[offset])
        first = (step + offset) << _BITS_IN_BATCH
        return indices, list(range(first, first + len(indices)))

    def _begin(self, epoch: int) -> _Units:
        for generator, first_seed in self._generators:
            generator.manual_seed(key_of("sampler's generator", first_seed, self._seed, epoch) >> 1)
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return _Units(self._sampler, key_of("sampler streams", self._seed, epoch))


class _Units:
    """A sampler's units, a few at a time, drawn from random streams that nobody else draws from."""

    def __init__(self, sampler: Iterable[Any], key: int) -> None:
        with KeptStreams():
            start_streams(key, 0)
            self._iterator = iter(sampler)
            self._streams = KeptStreams().keep()

    def take(self, number: int) -> list[Any]:
        """The next `number` units, fewer at the end."""
        with KeptStreams():
            self._streams.put_back()
            units = list(islice(self._iterator, number))
            self._streams.keep()
        return units

    def skip(self, number: int) -> None:
        while number > 0 and self.take(min(number, _BLOCK_LENGTH)):
            number -= _BLOCK_LENGTH


def _generators_of(sampler: Any) -> list[torch.Generator]:
    """The torch generators of a sampler and of those that it wraps."""
    found = []
    seen: list[Any] = []
    while sampler is not None and not any(sampler is other for other in seen):
        seen.append(sampler)
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            found.append(generator)
        sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
    return found


class RequestQueue:
    """The batch sampler that torch's loader sees, and the notes of what it has drawn and not delivered.

    Args:
        source: of the requests.
        streams: start each sample's random streams.
        in_process: torch fetches here and now, so that a request arrives as soon as it is drawn.
    """

    def __init__(self, source: Source, *, streams: bool, in_process: bool) -> None:
        self._source = source
        self._streams = streams
        self._in_process = in_process
        self._notes: deque[Note | None] = deque()
        self._begins: tuple[int, int] = (0, 0)

    def begin(self, epoch: int, start: int) -> deque[Note | None]:
        """The next `iter()` is of this epoch, from unit `start`.

        Returns:
            The notes of what has been drawn, in order: the first is that of what is delivered next.
        """
        self._begins = (epoch, start)
        self._notes = deque()
        return self._notes

    def __iter__(self) -> Iterator[Any]:
        notes = self._notes
        for request, note in self._source.requests(*self._begins):
            notes.append(note)
            if isinstance(request, SampleIndices):
                if not self._streams:
                    request = request.plain()
                elif self._in_process:
                    request.arrive()
            yield request
