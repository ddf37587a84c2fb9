"""Progress: who moves the collectives in flight on, and how long a rank waits for the others.

A collective is a generator. It runs until it needs what a peer has not posted yet, then yields whom it waits
for, and is resumed to look again. So any thread of this rank can move any collective on: the one that
issues it, the one that waits for it, and, if nobody does for a while, the group's own thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

from samestep.errors import CollectiveError
from samestep.shm.background import Background
from samestep.shm.operation import Operation
from samestep.shm.region import Region
from samestep.shm.signal import Signals

__all__ = ["Engine"]

_SPIN_S = 100e-6
_NAP_S = 0.1  # between two looks at whether the peers are alive
_NUM_YIELDS = 20
_NUM_POLLS = 300  # some tens of microseconds


class Engine:
    """Moves the operations of one rank of one group on.

    Args:
        region: of the group.
        signals: of the group.
        describe_peer: (rank, operation) -> what that rank is doing, for messages.
        grace_s: how long nobody may have made progress before the group's own thread does.
    """

    def __init__(
        self,
        region: Region,
        signals: Signals,
        describe_peer: Callable[[int], str],
        *,
        grace_s: float,
    ) -> None:
        self._region = region
        self._signals = signals
        self._describe_peer = describe_peer
        self.lock = threading.Lock()  # held by the thread that moves operations on, never while it sleeps
        self._active: list[Operation] = []
        self._completed: list[Operation] = []  # whose `on_done` is to be called, without the lock
        self._broken: str | None = None
        self._num_waiting = 0
        self._background = Background(self._progress_in_background, grace_s)
        self._closed = False
        cores = len(os.sched_getaffinity(0))
        shares_process = len(set(region.pids)) < len(region.pids)
        # Ranks that are threads of one process hold each other up while they spin; so do ranks > cores.
        self._spin_s = 0.0 if shares_process or region.num_ranks > cores else _SPIN_S
        self._num_yields = 0 if shares_process else _NUM_YIELDS
        self._sched_yield = ctypes.CDLL(None).sched_yield

    @property
    def num_polls(self) -> int:
        """How often to look for a flag before `wait` or `run` are worth calling."""
        return _NUM_POLLS if self._spin_s else 0

    def is_idle(self) -> bool:
        """Whether nothing is in flight and all is well. To be asked with the lock held."""
        return not self._active and self._broken is None and not self._signals.alarmed()

    def run_here(self, operation: Operation) -> None:
        """As `run`, with the lock held."""
        self._active.append(operation)
        self._drive(operation)

    def break_up(self, error: CollectiveError) -> None:
        """This rank and its peers can no longer use the group. With the lock held."""
        self._break(str(error), error)

    def start(self, make: Callable[[], Operation]) -> Operation:
        """Take up the operation that `make` returns and move it as far as it goes without waiting.

        Raises:
            CollectiveError: the group is broken.
        """
        with self.lock:
            operation = self._take_up(make)
            self._step()
        self._report_done()
        if not operation.done:
            self._background.touch()
            self._background.call()
        return operation

    def run(self, make: Callable[[], Operation]) -> None:
        """Take up the operation that `make` returns, and return when it is done.

        Raises:
            CollectiveError: it failed.
        """
        with self.lock:
            operation = self._take_up(make)
            self._drive(operation)
        if self._completed:
            self._report_done()
        if operation.error is not None:
            raise operation.error

    def wait(self, operation: Operation, timeout_s: float | None = None) -> None:
        """Return when `operation`, which was started, is done.

        Raises:
            CollectiveError: it failed, or `timeout_s` passed.
        """
        if timeout_s is not None:
            operation.deadline = min(operation.deadline, time.monotonic() + timeout_s)
        if not operation.done:
            with self.lock:
                self._drive(operation)
            self._report_done()
        if operation.error is not None:
            raise operation.error

    def poll(self) -> None:
        """Move all operations as far as they go without waiting, unless another thread is at it."""
        if self.lock.acquire(blocking=False):
            try:
                self._step()
            finally:
                self.lock.release()
            self._background.touch()
            self._report_done()

    def when_done(self, operation: Operation, callback: Callable[[], None]) -> None:
        """Call `callback` when `operation` is done, at once if it is; nobody need wait for it."""
        with self.lock:
            done = operation.done
            if not done:
                operation.on_done.append(callback)
        if done:
            callback()
        else:
            self._background.hurry()

    def abort(self, reason: str) -> None:
        """All operations of this rank end with an error, and so do those of its peers. From any thread."""
        self._broken = self._broken or reason
        self._signals.leave(Signals.BROKEN, reason)
        with self.lock:
            self._fail(CollectiveError(reason))
        self._report_done()

    def close(self) -> None:
        """The group's thread ends. Operations in flight are left as they are."""
        self._closed = True
        self._background.stop()
        self._signals.rise()
        self._background.join()

    def _take_up(self, make: Callable[[], Operation]) -> Operation:
        if self._signals.alarmed() and self._broken is None:
            self._hear()
        if self._broken is not None:
            raise CollectiveError(f"the group can no longer be used: {self._broken}")
        operation = make()
        self._active.append(operation)
        return operation

    def _step(self) -> bool:
        """Resume each operation once; whether any of them got further."""
        moved = False
        for operation in tuple(self._active):
            try:
                blocked = next(operation.progress)
                if blocked is not operation.blocked:
                    operation.blocked = blocked
                    moved = True
            except StopIteration:
                self._active.remove(operation)
                self._finish(operation)
                moved = True
            except CollectiveError as error:
                self._break(str(error), error)
                moved = True
            except Exception as error:
                self._break(f"{self._who()}: {operation.title} failed: {error}", error)
                moved = True
            except BaseException as error:
                self._break(f"{self._who()}: {operation.title} was interrupted by {error!r}", None)
                raise
        return moved

    def _drive(self, operation: Operation | None) -> None:
        """Move operations on until `operation` is done (None: until all are, or others wait themselves).

        Holds the lock, but for the time it sleeps.
        """
        own_thread = operation is None
        self._num_waiting += 0 if own_thread else 1
        try:
            # The group's own thread does not spin: it would do so with Python's lock held.
            spin_s = 0.0 if own_thread else self._spin_s
            most_yields = 0 if own_thread else self._num_yields
            quiet_since = 0.0
            num_yields = 0
            lying = False
            while True:
                moved = self._step()
                if operation is not None and operation.done:
                    return
                if own_thread and (self._completed or not self._active or self._num_waiting or self._closed):
                    return
                if moved:
                    quiet_since, num_yields = 0.0, 0
                    if lying:
                        lying = False
                        self._signals.rise()
                    continue
                if lying:
                    lying = False
                    self._sleep()
                    continue
                now = time.monotonic()
                if not quiet_since:
                    quiet_since = now
                elif now - quiet_since < spin_s:
                    continue
                if num_yields < most_yields:
                    num_yields += 1
                    self._sched_yield()
                    continue
                lying = True
                self._signals.lie_down()
        finally:
            if lying:
                self._signals.rise()
            self._num_waiting -= 0 if own_thread else 1
            if self._active and not own_thread and self._background.is_started:
                self._background.touch()
                self._background.call()

    def _sleep(self) -> None:
        nap = _NAP_S
        for operation in self._active:
            nap = min(nap, max(0.0, operation.deadline - time.monotonic()))
        self.lock.release()
        try:
            self._signals.sleep(nap)
        finally:
            self.lock.acquire()
            self._signals.rise()
        self._inspect()

    def _inspect(self) -> None:
        """Fail if a peer has broken the group, has died or left, or if an operation's time is up."""
        if not self._active:
            return
        if self._signals.alarmed():
            self._hear()
            return
        gone = self._gone()
        if gone and not self._step():  # what it posted before it went still counts
            for operation in self._active:
                waits_for = -1 if operation.blocked is None else operation.blocked[0]
                lost = gone.keys() if operation.needs_all or waits_for < 0 else gone.keys() & {waits_for}
                if lost:
                    rank = min(lost)
                    self._break(f"{self._who()}: {operation.title} cannot end: {gone[rank]}", None)
                    return
        now = time.monotonic()
        for operation in self._active:
            if now >= operation.deadline:
                rank = -1 if operation.blocked is None else operation.blocked[0]
                peer = "any rank" if rank < 0 else self._describe_peer(rank)
                self._break(f"{self._who()}: {operation.title} timed out waiting for {peer}", None)
                return

    def _hear(self) -> None:
        """Somebody has broken the group: so has this rank, for the same reason."""
        for rank in range(self._region.num_ranks):
            if self._signals.state(rank) == Signals.BROKEN:
                self._break(self._signals.report(rank), None)
                return

    def _gone(self) -> dict[int, str]:
        """The peers that died or left the group -> what to say of them."""
        gone = {}
        dead = self._signals.dead()
        for rank, pid in enumerate(self._region.pids):
            if rank == self._region.rank:
                continue
            if self._signals.state(rank) == Signals.LEFT:
                gone[rank] = f"rank {rank} (process {pid}) has destroyed the group"
            elif rank in dead:
                gone[rank] = f"rank {rank} (process {pid}) has died"
        return gone

    def _who(self) -> str:
        return f"rank {self._region.rank} (process {os.getpid()})"

    def _break(self, reason: str, error: BaseException | None) -> None:
        """This rank can no longer use the group, nor can its peers."""
        if self._broken is None:
            self._broken = reason
            self._signals.leave(Signals.BROKEN, reason)
        self._fail(error if error is not None else CollectiveError(reason))

    def _fail(self, error: BaseException) -> None:
        failed, self._active = self._active, []
        for operation in failed:
            operation.error = error
            operation.progress.close()
            self._finish(operation)

    def _finish(self, operation: Operation) -> None:
        operation.done = True
        if operation.on_done:
            self._completed.append(operation)
        if self._num_waiting > 1:
            self._signals.rise()  # another thread may sleep for this one

    def _report_done(self, *, elsewhere: bool = False) -> None:
        """Call what was to be called when operations are done: here, or in threads of the pool.

        A callback may issue another collective and wait for its future, as torch's PowerSGD does: never let
        it do that in the thread that would complete it.
        """
        while self._completed:
            with self.lock:
                completed, self._completed = self._completed, []
            for operation in completed:
                for callback in operation.on_done:
                    if elsewhere:
                        self._background.submit(callback)
                    else:
                        callback()

    def _progress_in_background(self) -> bool:
        with self.lock:
            if self._num_waiting == 0 and not self._closed:
                self._drive(None)
            more = bool(self._active)
            if not more:
                self._background.calm()
            others_wait = self._num_waiting > 0
        self._report_done(elsewhere=True)
        # Those who wait make progress, and call again when they stop.
        return more and not others_wait
