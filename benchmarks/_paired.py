"""Two ways of doing the same, timed side by side in one run: A B A B ..., the ratio of each round.

Machines differ and their load changes by the minute; the ratio of two neighbours in time changes least.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from samestep.arithmetic import cpu_model


@dataclass(frozen=True)
class Comparison:
    """One row: the figure of each round for ours and for theirs, in `unit` (the smaller the better)."""

    name: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    unit: str = "s"
    scale: float = 1.0  # what a figure is multiplied by to be in `unit`

    @property
    def ratios(self) -> list[float]:
        """Ours / theirs, per round."""
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    def row(self) -> list[str]:
        def median(figures: Sequence[float]) -> str:
            return f"{statistics.median(figures) * self.scale:.4g} {self.unit}"

        ratios = self.ratios
        spread = f"{min(ratios):.3g} .. {max(ratios):.3g}"
        return [self.name, median(self.ours), median(self.theirs), f"{statistics.median(ratios):.3g}", spread]


def seconds(action: Callable[[], object]) -> float:
    """How long `action()` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def compare(
    name: str,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    *,
    num_rounds: int = 5,
    unit: str = "s",
    scale: float = 1.0,
) -> Comparison:
    """Take the figure of `ours` and `theirs` in turn, `num_rounds` times each, after one of each unseen."""
    ours()
    theirs()
    rounds = [(ours(), theirs()) for _ in range(num_rounds)]
    return Comparison(name, tuple(r[0] for r in rounds), tuple(r[1] for r in rounds), unit, scale)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "processor": cpu_model(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def report(
    title: str,
    comparisons: Sequence[Comparison],
    *,
    json_path: Path | None = None,
    page: Path | None = None,
    marker: str = "",
) -> None:
    """Print the table; write it to `json_path` and between the `marker` comments of `page`, where given."""
    rows = [{**vars(comparison), "ratios": comparison.ratios} for comparison in comparisons]
    publish(
        title,
        ["", "ours", "theirs", "ratio (median)", "ratio (min .. max)"],
        [comparison.row() for comparison in comparisons],
        where=machine(),
        record={"title": title, "machine": machine(), "rows": rows},
        json_path=json_path,
        page=page,
        marker=marker,
    )


def publish(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    record: Any,
    where: Mapping[str, Any] | None = None,
    json_path: Path | None = None,
    page: Path | None = None,
    marker: str = "",
) -> None:
    """Print the table, over `where` it was measured; write it between the `marker` comments of `page`, and
    `record` to `json_path`, where these are given."""
    caption = ", ".join(f"{key.removeprefix('num_')} {value}" for key, value in (where or {}).items())
    table = Table(*header, title=title, caption=caption or None)
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(record, indent=1) + "\n")
    if page is not None:
        text = "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows])
        write_between_markers(page, marker, f"{text}\n\n{caption}" if caption else text)


def write_between_markers(page: Path, marker: str, text: str) -> None:
    """`text` stands between `<!-- marker:begin -->` and `<!-- marker:end -->`; the rest is untouched."""
    begin, end = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
    content = page.read_text()
    before, found_begin, rest = content.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise SystemExit(f"{page} has no {begin} ... {end}: add these two lines where the table belongs")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
