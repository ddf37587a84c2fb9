"""The launcher's terminal: lines scroll above, progress bars stay below. Without a terminal: plain lines."""

from __future__ import annotations

import io
import os
import select
import time
from collections.abc import Sequence
from typing import TextIO

from samestep.observe.messages import BarState

_REDRAW_EVERY_S = 0.2
_PLAIN_EVERY_S = 10.0
_MAX_BARS = 20

_DIM = b"\x1b[2m%s\x1b[0m"
_ERASE_BELOW = b"\x1b[0J"


class Screen:
    """Two streams, of which the second one may be a terminal that shows bars."""

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._stdout = stdout
        self._stderr = stderr
        self._is_coloured = {
            is_stderr: stream.isatty() and not os.environ.get("NO_COLOR")
            for is_stderr, stream in ((False, stdout), (True, stderr))
        }
        self._has_bars = stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._bars: dict[str, BarState] = {}
        self._printed_s: dict[str, float] = {}  # when a bar last got a plain line
        self._finished: list[BarState] = []
        self._num_drawn = 0  # lines of bars on the terminal, just above the cursor
        self._drawn_s = 0.0

    @property
    def redraw_interval_s(self) -> float | None:
        """How long a caller may wait before it calls `write` again; None: as long as it likes."""
        return _REDRAW_EVERY_S if self._bars else None

    def prefix(self, rank: int, *, is_stderr: bool) -> bytes:
        """What stands before each line of `rank`."""
        text = b"[rank %d]" % rank
        return (_DIM % text if self._is_coloured[is_stderr] else text) + b" "

    def write(self, stdout: Sequence[bytes], stderr: Sequence[bytes]) -> None:
        """Print whole lines, and draw the bars below them anew when it is time."""
        finished, self._finished = self._finished, []
        if self._has_bars:
            is_due = time.monotonic() - self._drawn_s >= _REDRAW_EVERY_S
            if not (stdout or stderr or finished or (is_due and self._bars)):
                return
            if self._num_drawn:
                _write(self._stderr, b"\x1b[%dA\r%s" % (self._num_drawn, _ERASE_BELOW))
                self._num_drawn = 0
            _write_lines(self._stdout, stdout)
            _write_lines(self._stderr, [*stderr, *self._rendered(finished)])
            bars = self._rendered(list(self._bars.values()))
            _write_lines(self._stderr, bars)
            self._num_drawn = len(bars)
            self._drawn_s = time.monotonic()
        else:
            from samestep.observe.render import plain_line

            _write_lines(self._stdout, stdout)
            shown = [plain_line(bar).encode() for bar in [*self._due_bars(), *finished]]
            _write_lines(self._stderr, [*stderr, *shown])

    def update_bar(self, state: BarState) -> None:
        """The next `write` shows the bar in this state."""
        if state.finished:
            self._bars.pop(state.bar, None)
            self._printed_s.pop(state.bar, None)
            self._finished.append(state)
        elif state.bar in self._bars or len(self._bars) < _MAX_BARS:
            self._bars[state.bar] = state
            self._printed_s.setdefault(state.bar, time.monotonic())

    def end_bars(self) -> None:
        """Bars whose ranks have ended stay as they are, as lines."""
        self._finished += self._bars.values()
        self._bars.clear()
        self._printed_s.clear()
        self.write([], [])

    def close(self) -> None:
        """Leave nothing but lines."""
        try:
            self.end_bars()
        except OSError:
            return

    def _due_bars(self) -> list[BarState]:
        now_s = time.monotonic()
        due = [b for name, b in self._bars.items() if now_s - self._printed_s[name] >= _PLAIN_EVERY_S]
        self._printed_s.update((bar.bar, now_s) for bar in due)
        return due

    def _rendered(self, bars: Sequence[BarState]) -> list[bytes]:
        if not bars:
            return []
        from rich.console import Console

        from samestep.observe.render import bar_table

        size = os.get_terminal_size(self._stderr.fileno())
        width = max(20, (size.columns or 80) - 1)  # a full last column makes some terminals wrap
        buffer = io.StringIO()
        console = Console(file=buffer, force_terminal=True, width=width, legacy_windows=False)
        console.print(bar_table(bars[: max(1, (size.lines or 24) - 1)]))
        return buffer.getvalue().encode().splitlines()


def _write_lines(stream: TextIO, lines: Sequence[bytes]) -> None:
    if lines:
        _write(stream, b"\n".join(lines) + b"\n")


def _write(stream: TextIO, data: bytes) -> None:
    """All of `data`, past the stream's own buffer: it may be in the middle of nothing else."""
    stream.flush()
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(stream.fileno(), view) :]
        except BlockingIOError:  # somebody else made the terminal or pipe non-blocking
            select.select([], [stream.fileno()], [])
