"""Flags between processes: post one, wait for others, notice a peer that died.

[Note: Memory ordering]
Data is written first, then the flag that announces it; a reader that sees the flag must see the data. And a
rank that goes to sleep announces that first and looks at the flags once more after it, while whoever posts
writes the flag first and looks for sleepers after it: of the two, at least one must see the other.

On x86 stores become visible in program order and loads happen in program order (TSO), so the first needs
nothing; the second needs a full barrier between a store and a load, which is what the locked instruction
that acquires a `threading.Lock` is.

Elsewhere (aarch64, ...) neither holds by itself. There the fence is membarrier(2), GLOBAL_EXPEDITED: when it
returns, every running thread of every registered process has passed a full memory barrier. Each rank
registers itself, and calls it between the data and the flag, and between the flag and the look for sleepers.
That is enough for readers, who call nothing: a flag that was read as set was read after that barrier, and so
were the data. In the other direction it keeps what a rank has read before a flag from being read after it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import threading

from samestep.errors import WorldError
from samestep.shm.region import Layout, Region

__all__ = ["Signals", "knows_this_processor"]

_NUM_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}
_NUM_MEMBARRIER = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 2, 4
_ALL = 2**31 - 1
_WORD = 8
_ASLEEP = Layout.ASLEEP // _WORD
_STATE = Layout.STATE // _WORD
_ALARM = Layout.ALARM // _WORD


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def knows_this_processor() -> bool:
    """Whether the system calls' numbers on this processor are known here."""
    return platform.machine() in _NUM_FUTEX


class Signals:
    """The flags of a group's ranks.

    A flag is an aligned 8-byte word of its owner's segment that only the owner writes and that only grows.
    """

    ALIVE, LEFT, BROKEN = 0, 1, 2

    def __init__(self, region: Region, *, total_store_order: bool | None = None) -> None:
        machine = platform.machine()
        if not knows_this_processor():
            raise WorldError(f'backend="shm" does not know the processor {machine}: use backend="gloo"')
        libc = ctypes.CDLL(None, use_errno=True)
        self._syscall = libc.syscall
        self._num_futex = ctypes.c_long(_NUM_FUTEX[machine])
        self._region = region
        self._mine = region.segments[region.rank].words
        self._peers = [
            (segment.words, ctypes.c_void_p(segment.address + Layout.ASLEEP))
            for rank, segment in enumerate(region.segments)
            if rank != region.rank
        ]
        self._asleep = ctypes.c_void_p(region.segments[region.rank].address + Layout.ASLEEP)
        self._lock = threading.Lock()
        if total_store_order is None:
            total_store_order = machine == "x86_64"
        self._num_membarrier = None if total_store_order else ctypes.c_long(_NUM_MEMBARRIER[machine])
        if self._num_membarrier is not None:
            self._membarrier(_REGISTER_GLOBAL_EXPEDITED)
        self._deaths = select.poll()
        for fd in region.pidfds:
            if fd >= 0:
                self._deaths.register(fd, select.POLLIN)

    def store(self, word: int, value: int) -> None:
        """As `post`, but wakes nobody."""
        if self._num_membarrier is not None:
            self._membarrier(_GLOBAL_EXPEDITED)
        self._mine[word] = value

    def post(self, word: int, value: int) -> None:
        """Peers that see word number `word` of this rank at `value` also see all that was written before."""
        if self._num_membarrier is not None:
            self._membarrier(_GLOBAL_EXPEDITED)
        self._mine[word] = value
        self._fence()
        for words, address in self._peers:
            if words[_ASLEEP]:
                words[_ASLEEP] = 0
                self._syscall(self._num_futex, address, _FUTEX_WAKE, _ALL, None, None, 0)

    def lie_down(self) -> None:
        """Announce that this rank is about to sleep: look at every flag once more, then `sleep` or `rise`."""
        self._mine[_ASLEEP] = 1
        self._fence()

    def sleep(self, seconds: float) -> None:
        """Sleep in the kernel until a peer posts (at once if one has since `lie_down`), or `seconds` pass."""
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        one = ctypes.c_int(1)
        self._syscall(self._num_futex, self._asleep, _FUTEX_WAIT, one, ctypes.byref(limit), None, 0)

    def rise(self) -> None:
        """Withdraw what `lie_down` announced; other threads of this rank that sleep look again."""
        self._mine[_ASLEEP] = 0
        self._syscall(self._num_futex, self._asleep, _FUTEX_WAKE, _ALL, None, None, 0)

    def state(self, rank: int) -> int:
        """`ALIVE`, `LEFT` (it destroyed the group) or `BROKEN` (it failed, or was told to abort)."""
        return int(self._region.segments[rank].words[_STATE])

    def leave(self, state: int, report: str = "") -> None:
        """This rank is in `state` from now on, and everyone looks; `report` says why it is broken."""
        text = report.encode()[: Layout.REPORT_BYTES - 1]
        memory = self._region.segments[self._region.rank].memory
        memory[Layout.REPORT : Layout.REPORT + len(text) + 1] = text + b"\0"
        self.post(_STATE, state)
        if state == Signals.BROKEN:
            for segment in self._region.segments:
                segment.words[_ALARM] = 1
        self.rise()

    def alarmed(self) -> bool:
        """Whether some rank, maybe this one, has broken the group."""
        return bool(self._mine[_ALARM])

    def report(self, rank: int) -> str:
        """What `rank` left to be read when it broke the group."""
        memory = self._region.segments[rank].memory
        text = memory[Layout.REPORT : Layout.REPORT + Layout.REPORT_BYTES]
        return text.partition(b"\0")[0].decode(errors="replace")

    def dead(self) -> set[int]:
        """The ranks whose processes have ended.

        A pidfd is asked, not /proc: it refers to the process, whoever is given its number later.
        """
        ended = {fd for fd, _ in self._deaths.poll(0)}
        return {rank for rank, fd in enumerate(self._region.pidfds) if fd in ended}

    def _fence(self) -> None:
        if self._num_membarrier is None:
            self._lock.acquire()
            self._lock.release()
        else:
            self._membarrier(_GLOBAL_EXPEDITED)

    def _membarrier(self, command: int) -> None:
        if self._syscall(self._num_membarrier, command, 0, 0):
            problem = os.strerror(ctypes.get_errno())
            raise WorldError(
                f'backend="shm" orders memory by membarrier(2) here, which fails ({problem}): use "gloo"'
            )
