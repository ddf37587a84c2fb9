"""Memory that the ranks of one host share: anonymous segments, how they are laid out and attached.

A segment is a memfd: memory behind a file descriptor that never had a name. Peers attach it through
`/proc/<pid>/fd`, so there is nothing to unlink and nothing that any end of a process, `kill -9` included,
could leave behind. Neither does the size of /dev/shm (64 MB in many containers) bound it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import select
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

from samestep.errors import WorldError

__all__ = ["CACHE_LINE", "Layout", "Region", "Segment", "can_share"]

CACHE_LINE = 64
_PAGE = 4096
_WORD = 8
_LOOK_AGAIN_S = 0.0005
_DONE, _FAILED = 1, 2  # of the word `attached`
_MAX_STAGE_BYTES = 1024 * 1024
_MIN_STAGE_BYTES = 16 * 1024
_MAX_LANE_BYTES = 512 * 1024


class Segment:
    """A piece of shared memory, mapped into this process.

    Memory: mapped until the last tensor or view over it is gone; the pages are the system's again when the
    last process that maps them has let go or ended.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self.memory = mmap.mmap(fd, num_bytes)
        self.words = memoryview(self.memory).cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        """A new segment of zeros, its memory reserved: touching it later cannot fail.

        Raises:
            OSError: there is not that much memory.
        """
        fd = os.memfd_create("samestep-shm", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            return cls(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, pid: int, fd: int, num_bytes: int) -> Segment:
        """The segment that process `pid` has open as `fd`."""
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(opened, num_bytes)
        finally:
            os.close(opened)  # the mapping holds the memory

    def tensor(self, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """`numel` elements of the segment from byte `offset`, as a tensor that keeps the mapping alive."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=offset)

    def close(self) -> None:
        """Close the file descriptor of a created segment; peers can no longer attach it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True)
class Layout:
    """Where things are in each rank's control segment, in bytes from its start; equal on all ranks.

    token, state, asleep, finished   one word each, on cache lines of their own; beside the token `attached`,
                                     whether this rank has mapped all others' segments; beside the state
                                     `alarm`, which whoever breaks the group sets in all segments
    report                           why this rank broke the group, as text
    slots                            one per collective in flight: a flag, then its description
    lanes                            one per peer, for send and recv: two counters, then a buffer
    stages                           NUM_STAGES buffers through which private tensors travel
    """

    num_ranks: int
    stage_bytes: int

    NUM_SLOTS = 16
    NUM_STAGES = 3
    SLOT_BYTES = 4 * CACHE_LINE
    REPORT_BYTES = 1024
    TOKEN = 0
    ATTACHED = TOKEN + _WORD
    STATE = CACHE_LINE
    ALARM = STATE + _WORD
    ASLEEP = 2 * CACHE_LINE
    FINISHED = 3 * CACHE_LINE
    REPORT = 4 * CACHE_LINE
    SLOTS = REPORT + REPORT_BYTES
    LANES = SLOTS + NUM_SLOTS * SLOT_BYTES
    LANE_HEAD_BYTES = 4 * CACHE_LINE

    @property
    def lane_bytes(self) -> int:
        """Of the buffer of one lane: all lanes of a rank together take no more than a stage, about."""
        share = min(self.stage_bytes // self.num_ranks, _MAX_LANE_BYTES)
        return max(_PAGE, share // _PAGE * _PAGE)

    @property
    def stages(self) -> int:
        """Where the first stage starts."""
        end = self.LANES + self.num_ranks * (self.LANE_HEAD_BYTES + self.lane_bytes)
        return -(-end // _PAGE) * _PAGE

    @property
    def num_bytes(self) -> int:
        """Size of the segment."""
        return self.stages + self.NUM_STAGES * self.stage_bytes

    def slot(self, sequence: int) -> int:
        """The slot of collective number `sequence`."""
        return self.SLOTS + sequence % self.NUM_SLOTS * self.SLOT_BYTES

    def lane(self, peer: int) -> int:
        """The lane through which this rank sends to `peer`."""
        return self.LANES + peer * (self.LANE_HEAD_BYTES + self.lane_bytes)

    def stage(self, index: int) -> int:
        """Stage number `index`."""
        return self.stages + index % self.NUM_STAGES * self.stage_bytes


_ATTACHED = Layout.ATTACHED // _WORD


class Region:
    """The control segments of all ranks of a group: this rank's own, and its peers', attached.

    Ranks: all of the group construct one over the same store.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, timeout: timedelta) -> None:
        if not sys.platform.startswith("linux"):
            raise WorldError(f'backend="shm" needs Linux, and this is {sys.platform}: use backend="gloo"')
        mine, stage_bytes = _reserve(num_ranks)
        # The ranks agree on the smallest stage that any of them could reserve.
        token = secrets.randbits(62)
        mine.words[Layout.TOKEN // _WORD] = token
        card = {
            "pid": os.getpid(),
            "fd": mine.fd,
            "token": token,
            "stage_bytes": stage_bytes,
            "host": _host(),
        }
        store.set(f"rank-{rank}", json.dumps(card))
        self.cards: list[dict[str, Any]] = []
        for peer in range(num_ranks):
            store.wait([f"rank-{peer}"], timeout)
            self.cards.append(json.loads(store.get(f"rank-{peer}")))
        _check_hosts(self.cards, rank)
        self.rank = rank
        self.num_ranks = num_ranks
        self._closing = threading.Lock()
        self.pids = [int(card["pid"]) for card in self.cards]
        self.layout = Layout(num_ranks, min(int(card["stage_bytes"]) for card in self.cards))
        self.pidfds: list[int] = []
        try:
            self.pidfds += [self._pidfd(peer) for peer in range(num_ranks)]
            self.segments = [mine if peer == rank else self._attach(peer) for peer in range(num_ranks)]
        except BaseException:
            mine.words[_ATTACHED] = _FAILED
            raise
        mine.words[_ATTACHED] = _DONE
        self._wait_until_attached(timeout)

    def _wait_until_attached(self, timeout: timedelta) -> None:
        """All ranks have mapped all segments: whoever leaves now leaves nobody looking for its memory."""
        deadline = time.monotonic() + timeout.total_seconds()
        for peer, segment in enumerate(self.segments):
            while segment.words[_ATTACHED] != _DONE:
                has_died = self._has_died(peer)
                # A rank may have done its part and ended between these two looks.
                if segment.words[_ATTACHED] == _DONE:
                    break
                if has_died or segment.words[_ATTACHED] == _FAILED or time.monotonic() > deadline:
                    how = "has died" if has_died else "could not join"
                    raise WorldError(f"{self._who(peer)} {how} while rank {self.rank} set up the group")
                time.sleep(_LOOK_AGAIN_S)

    def _who(self, peer: int) -> str:
        return f"rank {peer} (process {self.pids[peer]})"

    def _pidfd(self, peer: int) -> int:
        if self.pids[peer] == os.getpid():
            return -1
        try:
            return os.pidfd_open(self.pids[peer])
        except ProcessLookupError as error:
            raise WorldError(f"{self._who(peer)} has died while rank {self.rank} set up the group") from error

    def _has_died(self, peer: int) -> bool:
        if self.pidfds[peer] < 0:
            return False
        poll = select.poll()
        poll.register(self.pidfds[peer], select.POLLIN)
        return bool(poll.poll(0))

    def _attach(self, peer: int) -> Segment:
        card = self.cards[peer]
        who = self._who(peer)
        try:
            segment = Segment.attach(self.pids[peer], int(card["fd"]), self.layout.num_bytes)
        except OSError as error:
            raise WorldError(
                f"rank {self.rank} cannot map the shared memory of {who}: {error.strerror}. Either it has "
                'ended, or this user may not look into it: use backend="gloo"'
            ) from error
        if segment.words[Layout.TOKEN // _WORD] != card["token"]:
            raise WorldError(f"{who} ended before rank {self.rank} could map its shared memory")
        return segment

    def close(self) -> None:
        """Let go of file descriptors, once; the mappings go with their last user. From any thread."""
        with self._closing:
            for fd in self.pidfds:
                if fd >= 0:
                    os.close(fd)
            self.pidfds = [-1] * self.num_ranks
            self.segments[self.rank].close()


def can_share() -> bool:
    """Whether this system has anonymous shared files that others can map, and handles of processes."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        _host()
        segment = Segment.create(_PAGE)
        try:
            Segment.attach(os.getpid(), segment.fd, _PAGE)
            os.close(os.pidfd_open(os.getpid()))
        finally:
            segment.close()
    except OSError:
        return False
    return True


def _reserve(num_ranks: int) -> tuple[Segment, int]:
    """This rank's control segment with the largest stages that fit, and their size."""
    stage_bytes = _MAX_STAGE_BYTES
    while True:
        num_bytes = Layout(num_ranks, stage_bytes).num_bytes
        try:
            return Segment.create(num_bytes), stage_bytes
        except OSError as error:
            if stage_bytes == _MIN_STAGE_BYTES:
                raise WorldError(
                    f'backend="shm" could not reserve {num_bytes / 2**20:.1f} MB of shared memory for this '
                    f'rank: {error.strerror}. Raise the memory limit, or use backend="gloo"'
                ) from error
            stage_bytes //= 2


def _host() -> list[str]:
    """What two processes have in common exactly when they can look into each other under /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return [boot, str(Path("/proc/self/ns/pid").readlink())]


def _check_hosts(cards: list[dict[str, Any]], rank: int) -> None:
    for peer, card in enumerate(cards):
        mine, theirs = cards[rank]["host"], card["host"]
        if mine[0] != theirs[0]:
            raise WorldError(
                f'backend="shm" is for ranks of one host, and ranks {rank} and {peer} are on different '
                'ones: use backend="gloo"'
            )
        if mine[1] != theirs[1]:
            raise WorldError(
                f'backend="shm" needs ranks in one PID namespace, and ranks {rank} and {peer} are '
                'in different containers: use backend="gloo", or start them in one container'
            )
