"""Send and receive: one lane per pair of ranks and direction, a ring of bytes in the sender's segment.

A message is a head of one cache line (tag, size, dtype) and its bytes, padded to whole cache lines. The
sender counts the bytes it has put in, the receiver those it has taken out; both counters only grow. A message
whose tag nobody waits for yet is set aside in private memory when a later one is wanted.
"""

from __future__ import annotations

import hashlib
from collections import deque

import torch

from samestep.errors import CollectiveError
from samestep.shm.exchange import copy_bytes
from samestep.shm.operation import Progress
from samestep.shm.region import CACHE_LINE, Region
from samestep.shm.signal import Signals

__all__ = ["Lanes", "Receipt"]

_WORD = 8
_TAG, _NUM_BYTES, _DTYPE = 0, 1, 2  # words of a message's head
_SENT, _RECEIVED = 0, CACHE_LINE // _WORD  # words of a lane's head


class Receipt:
    """A receive that was asked for, or a message that was set aside until it is.

    Args:
        tag: of the message.
        dtype: its dtype, or the digest of one.
        target: where its bytes go.
    """

    __slots__ = ("done", "dtype", "source", "tag", "target")

    def __init__(self, tag: int, dtype: torch.dtype | int, target: torch.Tensor) -> None:
        self.tag = tag
        self.dtype = dtype if isinstance(dtype, int) else _digest(dtype)
        self.target = target
        self.source: int | None = None  # who sends it, once that is known
        self.done = False


class _Inbox:
    """What has come, and is wanted, from one peer."""

    def __init__(self) -> None:
        self.wanted: list[Receipt] = []
        self.aside: list[Receipt] = []
        self.current: Receipt | None = None
        self.num_taken = 0  # bytes of the current message's payload


class Lanes:
    """The sends and receives of one rank. Only the thread that moves operations on calls it."""

    def __init__(self, region: Region, signals: Signals) -> None:
        self._region = region
        self._signals = signals
        self._layout = region.layout
        self._rank = region.rank
        self._ring_bytes = region.layout.lane_bytes
        self._sending: list[deque[int]] = [deque() for _ in range(region.num_ranks)]
        self._inboxes = [_Inbox() for _ in range(region.num_ranks)]
        self._num_sends = 0

    def send(self, peer: int, tag: int, payload: torch.Tensor, dtype: torch.dtype) -> Progress:
        """Done when all bytes of `payload` are in the lane to `peer`."""
        self._num_sends += 1
        number = self._num_sends
        queue = self._sending[peer]
        queue.append(number)
        return self._send(peer, tag, payload, _digest(dtype), number)

    def _send(self, peer: int, tag: int, payload: torch.Tensor, dtype: int, number: int) -> Progress:
        queue = self._sending[peer]
        if queue[0] != number:
            blocked = (peer, -number)
            while queue[0] != number:
                yield blocked
        word = self._word(peer, _SENT)
        sent = self._count(self._rank, peer, _SENT)
        yield from self._room(peer, sent)
        head = self._place(peer, sent) // _WORD
        words = self._region.segments[self._rank].words
        words[head + _TAG], words[head + _NUM_BYTES], words[head + _DTYPE] = tag, payload.numel(), dtype
        sent += CACHE_LINE
        done = 0
        while done < payload.numel():
            if self._free(peer, sent) < CACHE_LINE:
                self._signals.post(word, sent)
                yield from self._room(peer, sent)
            piece = self._piece(sent, payload.numel() - done, self._free(peer, sent))
            target = self._region.segments[self._rank].address + self._place(peer, sent)
            copy_bytes(target, payload.data_ptr() + done, piece)
            done += piece
            sent += _padded(piece)
            self._signals.post(word, sent)
        if done == 0:
            self._signals.post(word, sent)
        queue.popleft()

    def _room(self, peer: int, sent: int) -> Progress:
        """Return when there is room in the lane to `peer`, where `sent` bytes have been put."""
        if self._free(peer, sent) < CACHE_LINE:
            blocked = (peer, sent)
            while self._free(peer, sent) < CACHE_LINE:
                yield blocked

    def receive(self, peer: int | None, receipt: Receipt) -> Progress:
        """Done when the message that `receipt` asks for has come: from `peer`, or from anybody (None)."""
        sources = [r for r in range(self._region.num_ranks) if r != self._rank] if peer is None else [peer]
        for source in sources:
            inbox = self._inboxes[source]
            found = next((m for m in inbox.aside if m.tag == receipt.tag), None)
            if found is not None:
                inbox.aside.remove(found)
                return self._hand_over(source, found, receipt)
        for source in sources:
            self._inboxes[source].wanted.append(receipt)
        return self._receive(sources, receipt)

    def _receive(self, sources: list[int], receipt: Receipt) -> Progress:
        while True:
            moved = False
            for source in sources:
                moved = self._pump(source) or moved
            if receipt.done:
                return
            if not moved:
                blocked = (sources[0] if len(sources) == 1 else -1, -1)
                yield blocked
                while not any(self._waiting(source) for source in sources) and not receipt.done:
                    yield blocked

    def _hand_over(self, source: int, message: Receipt, receipt: Receipt) -> Progress:
        """A message that was set aside, maybe not complete yet, becomes the receipt's."""
        while not message.done:
            if not self._pump(source):
                blocked = (source, -1)
                yield blocked
                while not self._waiting(source) and not message.done:
                    yield blocked
        receipt.source = source
        self._fit(source, receipt, message.target.numel(), message.dtype)
        receipt.target.copy_(message.target)
        receipt.done = True

    def _pump(self, source: int) -> bool:
        """Take what has come from `source`; whether that was anything."""
        inbox = self._inboxes[source]
        moved = False
        while self._waiting(source):
            moved = True
            received = self._taken_from(source)
            segment, place = self._region.segments[source], self._place(self._rank, received)
            if inbox.current is None:
                words, head = segment.words, place // _WORD
                inbox.current = self._match(
                    source,
                    inbox,
                    int(words[head + _TAG]),
                    int(words[head + _NUM_BYTES]),
                    int(words[head + _DTYPE]),
                )
                inbox.num_taken = 0
                taken = CACHE_LINE
            else:
                target = inbox.current.target
                piece = self._piece(received, target.numel() - inbox.num_taken, self._waiting(source))
                copy_bytes(target.data_ptr() + inbox.num_taken, segment.address + place, piece)
                inbox.num_taken += piece
                taken = _padded(piece)
            self._signals.post(self._word(source, _RECEIVED), received + taken)
            if inbox.num_taken == inbox.current.target.numel():
                inbox.current.done = True
                inbox.current = None
        return moved

    def _match(self, source: int, inbox: _Inbox, tag: int, num_bytes: int, dtype: int) -> Receipt:
        """Who gets the message that begins now."""
        inbox.wanted = [r for r in inbox.wanted if r.source is None]  # not those that another sender served
        for receipt in inbox.wanted:
            if receipt.tag == tag:
                inbox.wanted.remove(receipt)
                receipt.source = source
                self._fit(source, receipt, num_bytes, dtype)
                return receipt
        message = Receipt(tag, dtype, torch.empty(num_bytes, dtype=torch.uint8))
        message.source = source
        inbox.aside.append(message)
        return message

    def _fit(self, source: int, receipt: Receipt, num_bytes: int, dtype: int) -> None:
        if num_bytes != receipt.target.numel() or dtype != receipt.dtype:
            pids = self._region.pids
            what = (
                f"{num_bytes} bytes where {receipt.target.numel()} are expected"
                if dtype == receipt.dtype
                else "a tensor of another dtype than is expected"
            )
            raise CollectiveError(
                f"rank {source} (process {pids[source]}) sends rank {self._rank} (process "
                f"{pids[self._rank]}), tag {receipt.tag}, {what}: give send and recv tensors of "
                "equal shape and dtype"
            )

    def _piece(self, position: int, wanted: int, available: int) -> int:
        """How many bytes to move at once: not around the ring's end, and not so many that the peer idles."""
        to_end = self._ring_bytes - position % self._ring_bytes
        return min(wanted, available, to_end, max(CACHE_LINE, self._ring_bytes // 4))

    def _place(self, receiver: int, position: int) -> int:
        """Where byte `position` of a lane to `receiver` lies in the sender's segment."""
        return self._layout.lane(receiver) + self._layout.LANE_HEAD_BYTES + position % self._ring_bytes

    def _word(self, peer: int, which: int) -> int:
        return self._layout.lane(peer) // _WORD + which

    def _count(self, rank: int, peer: int, which: int) -> int:
        return int(self._region.segments[rank].words[self._word(peer, which)])

    def _free(self, peer: int, sent: int) -> int:
        """Bytes that the lane to `peer` can take, where `sent` bytes have been put."""
        return self._ring_bytes - (sent - self._count(peer, self._rank, _RECEIVED))

    def _taken_from(self, source: int) -> int:
        return self._count(self._rank, source, _RECEIVED)

    def _waiting(self, source: int) -> int:
        """Bytes that have come from `source` and have not been taken."""
        return self._count(source, self._rank, _SENT) - self._taken_from(source)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // CACHE_LINE) * CACHE_LINE


def _digest(dtype: torch.dtype) -> int:
    return int.from_bytes(hashlib.blake2b(str(dtype).encode(), digest_size=7).digest(), "little")
