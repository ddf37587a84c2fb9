"""What the ranks print: one thread reads their pipes and writes whole lines, each with its rank before it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from samestep.launch.lines import Line, LineCutter
from samestep.launch.screen import Screen
from samestep.observe.messages import BarState

if TYPE_CHECKING:
    from samestep.launch.rank import Rank

_READ_BYTES = 1 << 16
_OVERWRITTEN_EVERY_S = 1.0


class _Stream:
    """One rank's standard output or standard error."""

    def __init__(self, rank: int, fd: int, *, is_stderr: bool, log: BinaryIO | None) -> None:
        self.rank = rank
        self.fd = fd
        self.is_stderr = is_stderr
        self.log = log
        self.cutter = LineCutter()
        self._shown_s = -_OVERWRITTEN_EVERY_S

    def read(self) -> Iterator[Line | BarState] | None:
        """What has come; None at the end of the stream."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return iter(())
        return self.cutter.feed(data) if data else None

    def is_worth_showing(self, line: Line) -> bool:
        """False for most of the lines that the next one overwrites: a bar drawn 20 times a second."""
        if not line.is_overwritten:
            return True
        now_s = time.monotonic()
        if not line.text or now_s - self._shown_s < _OVERWRITTEN_EVERY_S:
            return False
        self._shown_s = now_s
        return True

    def close(self) -> None:
        os.close(self.fd)
        if self.log is not None:
            self.log.close()


class Output:
    """The launcher's own standard output and error, shared by all ranks; lines are never mixed.

        with Output(log_dir) as output:
            output.follow(rank, stdout_fd, stderr_fd)
            ...
            output.drain(1.0)

    With a `log_dir`, the lines also go to `rank_N/stdout.log` and `stderr.log` in it, without the rank
    before them and after those of earlier runs.
    """

    def __init__(self, log_dir: Path | None = None) -> None:
        self.is_broken = False  # nobody reads our output any more
        self._log_dir = log_dir
        self._screen = Screen(sys.stdout, sys.stderr)
        self._lock = threading.Lock()  # of the screen and of `_streams`
        self._streams: dict[int, _Stream] = {}
        self._ranks: dict[int, Rank] = {}  # by pidfd: those whose end is watched
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._is_closing = False
        self._thread = threading.Thread(target=self._pump, name="samestep-output", daemon=True)

    def __enter__(self) -> Output:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing = True
        self._wake()
        self._thread.join(1.0)
        if self._thread.is_alive():  # our own output is blocked; nothing more can be done
            return
        for stream in list(self._streams.values()):
            self._end_stream(stream)
        for pidfd in list(self._ranks):
            self._unwatch(pidfd)
        self._screen.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def follow(self, rank: Rank, stdout: int, stderr: int) -> None:
        """Lines from the read ends of `rank`'s pipes are shown from now on; both are closed at their end."""
        for fd, is_stderr in ((stdout, False), (stderr, True)):
            os.set_blocking(fd, False)
            log = self._open_log(rank.rank, is_stderr=is_stderr)
            with self._lock:
                self._streams[fd] = _Stream(rank.rank, fd, is_stderr=is_stderr, log=log)
            self._selector.register(fd, selectors.EVENT_READ)
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(rank.pid)
                self._ranks[pidfd] = rank
                self._selector.register(pidfd, selectors.EVENT_READ)
        self._wake()

    def drain(self, patience_s: float) -> None:
        """Return when all that the ranks have printed is shown; call it when they have ended."""
        deadline = time.monotonic() + patience_s
        while (self._streams or self._ranks) and time.monotonic() < deadline:
            time.sleep(0.005)
        if self._lock.acquire(timeout=max(0.1, deadline - time.monotonic())):
            try:
                for stream in list(self._streams.values()):  # a process that escaped holds them open
                    self._end_stream(stream)
                self._screen.end_bars()
            finally:
                self._lock.release()

    def say(self, text: str) -> None:
        """Print the launcher's own lines on standard error."""
        if self._lock.acquire(timeout=1.0):
            try:
                self._screen.write([], text.encode("utf-8", "replace").splitlines())
            except OSError:
                self.is_broken = True
            finally:
                self._lock.release()

    def log(self, rank: int, text: str) -> None:
        """Add lines of the launcher's to a rank's `stderr.log`, if there is one."""
        log = self._open_log(rank, is_stderr=True)
        if log is not None:
            with log:
                log.write(text.encode("utf-8", "replace"))

    def _open_log(self, rank: int, *, is_stderr: bool) -> BinaryIO | None:
        if self._log_dir is None:
            return None
        folder = self._log_dir / f"rank_{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / ("stderr.log" if is_stderr else "stdout.log")).open("ab", buffering=0)

    def _wake(self) -> None:
        os.write(self._wake_write, b".")

    def _pump(self) -> None:
        while not self._is_closing:
            events = self._selector.select(self._screen.redraw_interval_s)
            with self._lock:
                try:
                    self._show(key.fd for key, _ in events)
                except OSError:
                    if not self.is_broken:  # as a program ends whose reader (`| head`) has gone
                        self.is_broken = True
                        os.kill(os.getpid(), signal.SIGTERM)

    def _show(self, ready: Iterable[int]) -> None:
        stdout: list[bytes] = []
        stderr: list[bytes] = []
        for fd in ready:
            if fd in self._ranks:
                self._ranks[fd].ended_s = time.time()
                self._unwatch(fd)
            elif fd == self._wake_read:
                os.read(fd, 1 << 10)
            elif (stream := self._streams.get(fd)) is not None:
                lines = stderr if stream.is_stderr else stdout
                items = stream.read()
                if items is None:
                    lines += self._lines(stream, stream.cutter.flush())
                    self._forget(stream)
                else:
                    lines += self._lines(stream, items)
        self._screen.write(stdout, stderr)

    def _lines(self, stream: _Stream, items: Iterable[Line | BarState]) -> list[bytes]:
        prefix = self._screen.prefix(stream.rank, is_stderr=stream.is_stderr)
        lines: list[bytes] = []
        logged: list[bytes] = []
        for item in items:
            if isinstance(item, BarState):
                self._screen.update_bar(item)
                continue
            logged.append(item.text)
            if stream.is_worth_showing(item):
                lines.append(prefix + item.text)
        if stream.log is not None and logged:
            stream.log.write(b"".join(line + b"\n" for line in logged))
        return lines

    def _end_stream(self, stream: _Stream) -> None:
        """Show what the stream still holds, and stop reading it."""
        lines = self._lines(stream, stream.cutter.flush())
        self._forget(stream)
        with contextlib.suppress(OSError):
            self._screen.write([] if stream.is_stderr else lines, lines if stream.is_stderr else [])

    def _forget(self, stream: _Stream) -> None:
        del self._streams[stream.fd]
        self._selector.unregister(stream.fd)
        stream.close()

    def _unwatch(self, pidfd: int) -> None:
        del self._ranks[pidfd]
        self._selector.unregister(pidfd)
        os.close(pidfd)
