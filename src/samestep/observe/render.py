"""How a progress bar looks: as a row of a rich table, or as one plain line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from samestep.observe.messages import BarState

if TYPE_CHECKING:
    from rich.table import Table


def bar_table(bars: Sequence[BarState]) -> Table:
    """One row for each bar: description, bar, count, figures, time."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    for bar in bars:
        is_pulsing = bar.total is None and not bar.finished
        table.add_row(
            Text(bar.description, no_wrap=True, overflow="ellipsis"),
            ProgressBar(
                total=bar.total or max(1, bar.done),
                completed=bar.done,
                width=30,
                pulse=is_pulsing,
                animation_time=bar.elapsed_s,
            ),
            Text(_count(bar), style="progress.percentage", no_wrap=True),
            Text(_figures(bar), no_wrap=True, overflow="ellipsis"),
            Text(_time(bar), style="progress.elapsed", no_wrap=True),
        )
    return table


def plain_line(bar: BarState) -> str:
    """The bar's state in words, for logs: `epoch 1: 30/100 (30 %), loss 0.12, 0:05, 6.0 a second`."""
    share = f" ({100 * bar.done // bar.total} %)" if bar.total else ""
    parts = [f"{_count(bar)}{share}", _figures(bar), _time(bar)]
    text = ", ".join(part for part in parts if part)
    return f"{bar.description}: {text}" if bar.description else text


def _count(bar: BarState) -> str:
    return f"{bar.done}/{bar.total}" if bar.total is not None else str(bar.done)


def _figures(bar: BarState) -> str:
    return ", ".join(f"{name} {value}" for name, value in bar.figures.items())


def _time(bar: BarState) -> str:
    text = _clock(bar.elapsed_s)
    if not bar.done or bar.elapsed_s <= 0:
        return text
    rate = bar.done / bar.elapsed_s
    if bar.total is not None and bar.total > bar.done:
        text += f", {_clock((bar.total - bar.done) / rate)} to go"
    return f"{text}, {rate:.3g} a second"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(min(seconds, 1e9)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
