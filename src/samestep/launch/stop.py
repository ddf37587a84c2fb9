"""Signals to the launcher: the first one ends the run in order, the second one at once."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn

from samestep.launch.ranks import LocalRanks

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class Stopped(BaseException):
    """Raised in the main thread by the first signal that asks the launcher to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class SignalWatch:
    """While entered, signals become `Stopped`; SIGUSR1 and SIGUSR2 go on to the ranks.

    Args:
        local_ranks: get SIGINT as SIGINT, so that a script may catch KeyboardInterrupt and save; other
            signals as SIGTERM. The second signal kills them, and this process.
        grace_s: how long after SIGTERM they may take to save. Who presses Ctrl-C does not want to wait.
    """

    def __init__(self, local_ranks: LocalRanks, grace_s: float) -> None:
        self._local_ranks = local_ranks
        self._grace_s = grace_s
        self._received: int | None = None
        self._leave: Callable[[int], NoReturn] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalWatch:
        for signum in (*_ENDING, *_PASSED_ON):
            before = signal.getsignal(signum)
            # `nohup` and a shell's `&` ask for signals to be ignored.
            if before is not signal.SIG_IGN:
                self._before[signum] = before
                signal.signal(signum, self._end if signum in _ENDING else self._forward)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    @contextlib.contextmanager
    def importing(self, leave: Callable[[int], NoReturn]) -> Iterator[None]:
        """In this block `leave` is called with the signal: imports may swallow exceptions, and take long."""
        self._leave = leave
        try:
            yield
        finally:
            self._leave = None

    def check(self) -> None:
        """Raise `Stopped` if a signal has come: one that was raised elsewhere may have been swallowed."""
        if self._received is not None:
            raise Stopped(self._received)

    def _end(self, signum: int, frame: FrameType | None) -> None:
        if self._received is not None:
            self._local_ranks.kill()
            os._exit(128 + signum)
        self._received = signum
        if signum == signal.SIGINT:
            self._local_ranks.stop_signal = signal.SIGINT
        else:
            self._local_ranks.stop_signal = signal.SIGTERM
            self._local_ranks.grace_s = self._grace_s
        self._local_ranks.ask_to_end()
        if self._leave is not None:
            self._leave(signum)
        raise Stopped(signum)

    def _forward(self, signum: int, frame: FrameType | None) -> None:
        self._local_ranks.send(signum)
