"""`samestep.progress`: a progress bar that rank 0 alone shows.

Under `samestep run` the launcher owns the terminal, so the rank sends its state over standard error
(`messages.py`) and the launcher draws. Under any other launcher, or none, the rank draws with rich if
standard error is a terminal, and otherwise prints a line now and then.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, Protocol, SupportsFloat, TypeVar, overload

from samestep.environment import read_environment
from samestep.observe import messages
from samestep.observe.messages import BarState
from samestep.observe.render import bar_table, plain_line

T = TypeVar("T")

_UPDATE_EVERY_S = 0.1
_PLAIN_EVERY_S = 10.0


class Progress(Generic[T]):
    """A progress bar around an iterable, made by `progress`.

    Ranks: any, alone. Only rank 0's shows; nothing is communicated.
    """

    def __init__(self, iterable: Iterable[T], description: str, total: int | None, display: _Display) -> None:
        self.description = description
        self.done = 0
        self.total = total
        self._iterable = iterable
        self._display = display
        self._figures: dict[str, object] = {}
        self._started_s = time.monotonic()
        self._updated_s = self._started_s - _UPDATE_EVERY_S
        self._name = f"{os.getpid()}-{id(self):x}"
        self._is_closed = False

    def __iter__(self) -> Iterator[T]:
        with self:
            for item in self._iterable:
                yield item
                self.advance()

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("this progress bar does not know its length")
        return self.total

    def __enter__(self) -> Progress[T]:
        self._update()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()

    def show(self, **figures: object) -> None:
        """Show these figures (`loss=...`, `accuracy=...`) beside the bar from now on.

        Tensors and other numbers are read only when the bar is drawn, at most ten times a second, so that
        a device need not be waited for at every step.
        """
        self._figures.update({name: _without_graph(value) for name, value in figures.items()})
        self._update()

    def advance(self, steps: int = 1) -> None:
        """`steps` more are done."""
        self.done += steps
        self._update()

    def close(self) -> None:
        """Leave the bar as it is now, as a line; later calls change nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._display.show(self._state(finished=True))

    def _update(self) -> None:
        now_s = time.monotonic()
        if self._display.is_silent or self._is_closed or now_s - self._updated_s < _UPDATE_EVERY_S:
            return
        self._updated_s = now_s
        self._display.show(self._state(finished=False))

    def _state(self, *, finished: bool) -> BarState:
        return BarState(
            bar=self._name,
            description=str(self.description),
            done=self.done,
            total=self.total,
            elapsed_s=round(time.monotonic() - self._started_s, 3),
            figures={} if self._display.is_silent else {k: _format(v) for k, v in self._figures.items()},
            finished=finished,
        )


@overload
def progress(
    iterable: None = None, *, description: str = "", total: int | None = None, rank: int | None = None
) -> Progress[None]: ...


@overload
def progress(
    iterable: Iterable[T], *, description: str = "", total: int | None = None, rank: int | None = None
) -> Progress[T]: ...


def progress(
    iterable: Iterable[Any] | None = None,
    *,
    description: str = "",
    total: int | None = None,
    rank: int | None = None,
) -> Progress[Any]:
    """A progress bar that advances as `iterable` is gone through; rank 0 alone shows it.

        bar = samestep.progress(loader, description=f"epoch {epoch}")
        for images, labels in bar:
            ...
            bar.show(loss=loss)

    Without an iterable: `with samestep.progress(total=100) as bar: ... bar.advance()`.

    Ranks: any; nothing is communicated.

    Args:
        iterable: what to go through.
        description: a few words before the bar.
        total: number of items. Default: the iterable's length, if it has one.
        rank: which rank this is. Default: what the process group says, or else the launcher's variables.
    """
    if total is None and iterable is not None:
        # Generators have no length, and loaders over a stream raise TypeError when asked for theirs.
        known = operator.length_hint(iterable, -1)
        total = known if known >= 0 else None
    is_shown = (_own_rank() if rank is None else rank) == 0
    display = _choose_display() if is_shown else _Silent()
    return Progress(() if iterable is None else iterable, description, total, display)


def _own_rank() -> int:
    # Whoever has a process group has imported this: a bar alone does not import torch.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return read_environment().rank


class _Display(Protocol):
    is_silent: bool

    def show(self, state: BarState) -> None:
        """Bring `state` before a person's eyes."""


class _Silent:
    is_silent = True

    def show(self, state: BarState) -> None:
        """Nothing."""


class _Launcher:
    """Sends the state to `samestep run`."""

    is_silent = False

    def show(self, state: BarState) -> None:
        # One write, past any buffer: the launcher must not find it in pieces among other bytes.
        with contextlib.suppress(OSError):
            os.write(2, messages.encode(state))


class _Terminal:
    """Draws below the script's own lines, with rich."""

    is_silent = False

    def __init__(self) -> None:
        self._live: Any = None

    def show(self, state: BarState) -> None:
        from rich.console import Console
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=Console(stderr=True), auto_refresh=False)
            self._live.start()
        self._live.update(bar_table([state]), refresh=True)
        if state.finished:
            self._live.stop()


class _Plain:
    """Prints a line every ten seconds, and the last state."""

    is_silent = False

    def __init__(self) -> None:
        self._printed_s = time.monotonic()

    def show(self, state: BarState) -> None:
        now_s = time.monotonic()
        if state.finished or now_s - self._printed_s >= _PLAIN_EVERY_S:
            self._printed_s = now_s
            print(plain_line(state), file=sys.stderr, flush=True)  # noqa: T201


def _choose_display() -> _Display:
    if os.environ.get(messages.LISTENING_VARIABLE):
        return _Launcher()
    return _Terminal() if sys.stderr.isatty() else _Plain()


def _without_graph(value: object) -> object:
    """A tensor is cut from its graph, which would live as long as the figure; float() would warn of it."""
    detach = getattr(value, "detach", None)
    return detach() if callable(detach) else value


def _format(value: object) -> str:
    if isinstance(value, str | int):
        return str(value)
    if isinstance(value, SupportsFloat):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            return f"{float(value):.4g}"
    return str(value)
