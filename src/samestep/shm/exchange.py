"""How collectives move bytes: descriptions are compared, then data travels through stages in rounds.

[Note: Slots, steps and rounds]
Every collective of a group has a sequence number, a slot in each rank's segment (`sequence % NUM_SLOTS`) and
a flag there. A rank describes in its slot what it was called with, and posts step 1, 2, ... as the flag's
value `sequence << _STEP_BITS | step`; flags only grow, so a slot can be told from its former use.

Private tensors travel through stages: a rank fills a stage of its own segment, posts, waits until all have
posted, and drains its peers' stages. One such round needs one wait. All rounds of a group form one sequence,
whatever collective they belong to, and round n uses stage n % NUM_STAGES. A rank that has seen all ranks post
round n - 1 knows that they have drained round n - 2, so with two stages it may already fill that of round n;
all-reduce reads the rounds n - 1 and n - 2 in round n, hence three. Collectives take turns at the stages in
the order of their sequence numbers; those whose tensors lie in shared memory need no turn.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from samestep.errors import CollectiveError
from samestep.shm.heap import NOT_SHARED, Heap, Place
from samestep.shm.operation import Blocked, Progress
from samestep.shm.region import CACHE_LINE, Layout, Region
from samestep.shm.signal import Signals

__all__ = ["Exchange", "Label", "label_of"]

_WORD = 8
_STEP_BITS = 24
_TEXT_BYTES = Layout.SLOT_BYTES - 2 * CACHE_LINE
_MAX_VIEWS = 4096
# A short copy keeps Python's lock: to give it away is to wait until another thread hands it back.
_QUICK_BYTES = 64 * 1024
_quick_memmove = ctypes.PyDLL(None).memmove
_quick_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_quick_memmove.restype = None
_FINISHED = Layout.FINISHED // _WORD
_DYING_S = 2.0  # how long a peer may take from losing its files to being dead
_OUR_OWN_LACK = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# Words of a slot, from its start; the flag has a cache line of its own.
_DIGEST, _NUM_ROUNDS, _NUM_BYTES, _PLACE, _TEXT = 8, 9, 10, 11, 16


@dataclass(frozen=True)
class Label:
    """What a collective was called with, as far as it must agree between ranks."""

    text: str
    digest: int
    encoded: bytes

    @classmethod
    def of(cls, text: str) -> Label:
        """The label that says `text`."""
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        encoded = text.encode()[: _TEXT_BYTES - 1]
        return cls(text, digest, encoded + b"\0" * (_TEXT_BYTES - len(encoded)))


@lru_cache(maxsize=1024)
def label_of(text: str) -> Label:
    """The label that says `text`."""
    return Label.of(text)


class Exchange:
    """What one rank knows and does of the group's slots, stages and flags.

    Only the thread that moves operations on (see engine.py) calls it.
    """

    def __init__(self, region: Region, signals: Signals, heap: Heap) -> None:
        self.rank = region.rank
        self.num_ranks = region.num_ranks
        self.stage_bytes = region.layout.stage_bytes
        self._region = region
        self._signals = signals
        self._heap = heap
        self._layout = region.layout
        self._slot_words = [region.layout.slot(n) // _WORD for n in range(Layout.NUM_SLOTS)]
        self._text_places = [(word + _TEXT) * _WORD for word in self._slot_words]
        own = region.segments[region.rank]
        self.stage_addresses = [own.address + region.layout.stage(n) for n in range(Layout.NUM_STAGES)]
        self._mine = region.segments[region.rank].words
        self._memory = region.segments[region.rank].memory
        self._peers = [(r, s.words) for r, s in enumerate(region.segments) if r != region.rank]
        self._round = 0
        self._turns: deque[int] = deque()
        self._in_flight: list[int] = []
        self._views: dict[tuple[int, int, torch.dtype, int, int], torch.Tensor] = {}
        self._scratch: list[torch.Tensor] = []

    def scratch(self, num_tensors: int, dtype: torch.dtype, numel: int) -> list[torch.Tensor]:
        """Flat tensors to reduce in, of at most `stage_bytes` each.

        Memory: shared by all operations, so their values last until the one that uses them next waits.
        """
        while len(self._scratch) < num_tensors:
            self._scratch.append(torch.empty(self.stage_bytes, dtype=torch.uint8))
        num_bytes = numel * dtype.itemsize
        return [memory[:num_bytes].view(dtype) for memory in self._scratch[:num_tensors]]

    def join(self, sequence: int) -> None:
        """Collective number `sequence` has been issued: it is in flight, and has its turn at the stages."""
        self._in_flight.append(sequence)
        self._turns.append(sequence)

    def finish(self, sequence: int) -> None:
        """Collective number `sequence` is over for this rank."""
        in_flight, turns = self._in_flight, self._turns
        if in_flight:  # a small one that went at once is not listed
            in_flight.remove(sequence)
        if turns and turns[0] == sequence:
            turns.popleft()
        # Who waits for this will also be woken by this rank's next collective, which it needs.
        self._signals.store(_FINISHED, min(in_flight) if in_flight else sequence + 1)

    def pass_turn(self, sequence: int) -> None:
        """Collective number `sequence` needs no stages."""
        self._turns.remove(sequence)

    def turn(self, sequence: int) -> Progress:
        """Return when the stages are this collective's."""
        if self._turns[0] != sequence:
            blocked = (self.rank, sequence)
            while self._turns[0] != sequence:
                yield blocked

    def slot_free(self, sequence: int) -> Progress:
        """Return when all ranks are done with what the slot was used for before."""
        oldest = sequence - Layout.NUM_SLOTS + 1
        for rank, words in self._peers:
            if words[_FINISHED] < oldest:
                blocked = (rank, oldest)
                while words[_FINISHED] < oldest:
                    yield blocked

    def is_slot_free(self, sequence: int) -> bool:
        """Whether all ranks are done with what the slot was used for before."""
        oldest = sequence - Layout.NUM_SLOTS + 1
        return all(words[_FINISHED] >= oldest for _, words in self._peers)

    def describe(
        self,
        sequence: int,
        label: Label,
        *,
        num_rounds: int = 1,
        num_bytes: int = 0,
        place: Place = NOT_SHARED,
    ) -> None:
        """Say in the slot, which is free, what this rank was called with; step 1 will tell the peers."""
        slot = sequence % Layout.NUM_SLOTS
        word, mine = self._slot_words[slot], self._mine
        mine[word + _DIGEST] = label.digest
        mine[word + _NUM_ROUNDS] = num_rounds
        mine[word + _NUM_BYTES] = num_bytes
        if place is NOT_SHARED:
            mine[word + _PLACE] = -1
        else:
            for index, value in enumerate(place):
                mine[word + _PLACE + index] = value
        text = self._text_places[slot]
        self._memory[text : text + _TEXT_BYTES] = label.encoded

    def post(self, sequence: int, step: int) -> None:
        """All peers may see what this rank has done up to `step`."""
        self._signals.post(self._slot_words[sequence % Layout.NUM_SLOTS], sequence << _STEP_BITS | step)

    def wait(self, sequence: int, step: int) -> Progress:
        """Return when all peers have posted `step`."""
        word = self._slot_words[sequence % Layout.NUM_SLOTS]
        value = sequence << _STEP_BITS | step
        for rank, words in self._peers:
            if words[word] < value:
                blocked = (rank, value)
                while words[word] < value:
                    yield blocked

    def spin(self, sequence: int, step: int, num_polls: int) -> bool:
        """Whether all peers have posted `step`; look `num_polls` times before saying no."""
        word = self._slot_words[sequence % Layout.NUM_SLOTS]
        value = sequence << _STEP_BITS | step
        for _, words in self._peers:
            while words[word] < value:
                if num_polls <= 0:
                    return False
                num_polls -= 1
        return True

    def check(self, sequence: int, label: Label) -> None:
        """Compare what all ranks were called with, after step 1.

        Raises:
            CollectiveError: they differ; all ranks raise it, naming the same two.
        """
        word = self._slot_words[sequence % Layout.NUM_SLOTS] + _DIGEST
        for _, words in self._peers:
            if words[word] != label.digest:
                self._raise_mismatch(sequence)

    def num_bytes(self, sequence: int, rank: int) -> int:
        """How many bytes `rank` shows altogether, after step 1."""
        word = self._slot_words[sequence % Layout.NUM_SLOTS] + _NUM_BYTES
        return int(self._region.segments[rank].words[word])

    def places(self, sequence: int) -> tuple[list[Place], int]:
        """Where each rank's tensor lies, and how many of them are private, after step 1."""
        word = self._slot_words[sequence % Layout.NUM_SLOTS] + _PLACE
        places = [
            NOT_SHARED if segment.words[word] < 0 else Place(*segment.words[word : word + 4])
            for segment in self._region.segments
        ]
        return places, places.count(NOT_SHARED)

    def rounds(
        self,
        sequence: int,
        label: Label,
        num_rounds: int,
        fill: Callable[[int, int], None],
        drain: Callable[[int, int], None],
        *,
        num_bytes: int = 0,
    ) -> Progress:
        """Run a whole collective: in each round `fill(i, stage)`, post, wait for all, `drain(i, stage)`.

        Args:
            sequence: number of the collective.
            label: what must agree.
            num_rounds: how many rounds this rank needs, at least 1; all run the most that any needs.
            fill: writes what belongs to round i into this rank's stage.
            drain: reads what belongs to round i from all ranks' stages.
            num_bytes: what this rank shows altogether, for its peers' checks.
        """
        yield from self.turn(sequence)
        yield from self.slot_free(sequence)
        self.describe(sequence, label, num_rounds=num_rounds, num_bytes=num_bytes)
        index = 0
        while index < num_rounds:
            stage = self.next_stage()
            fill(index, stage)
            index += 1
            self.post(sequence, index)
            yield from self.wait(sequence, index)
            if index == 1:
                self.check(sequence, label)
                num_rounds = self._most_rounds(sequence)
            drain(index - 1, stage)
        self.finish(sequence)

    def next_stage(self) -> int:
        """The stage of the next round, which begins."""
        stage = self._round % Layout.NUM_STAGES
        self._round += 1
        return stage

    def stage(self, rank: int, stage: int, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """`numel` elements of a stage of `rank`, from byte `offset` in it. Kept: views are costly to make."""
        key = (rank, stage, dtype, offset, numel)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            start = self._layout.stage(stage) + offset
            view = self._views[key] = self._region.segments[rank].tensor(dtype, start, numel)
        return view

    def shared(
        self, sequence: int, places: list[Place], tensor: torch.Tensor
    ) -> Generator[Blocked, None, list[torch.Tensor]]:
        """All ranks' tensors, which lie in shared memory at `places`; this rank's is `tensor`, flat.

        Raises:
            CollectiveError: a peer's memory cannot be mapped though the peer lives.
        """
        tensors = [tensor] * self.num_ranks
        for rank, _ in self._peers:
            tensors[rank] = yield from self._view(sequence, rank, places[rank], tensor)
        return tensors

    def doing(self, rank: int) -> str:
        """What `rank` posted last, for messages."""
        words = self._region.segments[rank].words
        latest = max(int(words[word]) for word in self._slot_words)
        if latest == 0:
            return f"{self.name(rank)}, which has joined no collective yet"
        sequence = latest >> _STEP_BITS
        return (
            f"{self.name(rank)}, whose latest collective is number {sequence}, {self._text(rank, sequence)}"
        )

    def name(self, rank: int) -> str:
        """What to call `rank` in messages."""
        return f"rank {rank} (process {self._region.pids[rank]})"

    def _view(
        self, sequence: int, rank: int, place: Place, like: torch.Tensor
    ) -> Generator[Blocked, None, torch.Tensor]:
        """The tensor of `rank` at `place`, of the dtype and size of `like`.

        A process loses its files before it counts as dead: whoever cannot be mapped is given the time to.
        """
        blocked = (rank, sequence << _STEP_BITS)
        give_up_s: float | None = None
        while True:
            try:
                return self._heap.view(rank, place, like.dtype, like.numel())
            except OSError as error:
                now_s = time.monotonic()
                give_up_s = now_s + _DYING_S if give_up_s is None else give_up_s
                if error.errno in _OUR_OWN_LACK or now_s > give_up_s:
                    raise CollectiveError(
                        f"{self.name(self.rank)} cannot map a tensor of {self.name(rank)} in "
                        f"collective number {sequence}: {error.strerror}"
                    ) from error
            yield blocked

    def _most_rounds(self, sequence: int) -> int:
        word = self._slot_words[sequence % Layout.NUM_SLOTS] + _NUM_ROUNDS
        return max(int(segment.words[word]) for segment in self._region.segments)

    def _text(self, rank: int, sequence: int) -> str:
        start = self._text_places[sequence % Layout.NUM_SLOTS]
        raw = self._region.segments[rank].memory[start : start + _TEXT_BYTES]
        return raw.partition(b"\0")[0].decode(errors="replace")

    def _raise_mismatch(self, sequence: int) -> None:
        word = self._slot_words[sequence % Layout.NUM_SLOTS] + _DIGEST
        digests = [int(segment.words[word]) for segment in self._region.segments]
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        first, second = (f"{self.name(rank)} called {self._text(rank, sequence)}" for rank in (0, other))
        raise CollectiveError(f"collective number {sequence} differs between ranks: {first}, but {second}")


def copy_bytes(target: int, source: int, num_bytes: int) -> None:
    """Copy between two addresses: for few bytes much faster than `Tensor.copy_`."""
    if num_bytes <= _QUICK_BYTES:
        _quick_memmove(target, source, num_bytes)
    else:
        ctypes.memmove(target, source, num_bytes)


def pieces(numel: int, length: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each of the consecutive pieces of at most `length` elements; one, empty, for none."""
    for start in range(0, max(numel, 1), length):
        yield start, min(start + length, numel)
