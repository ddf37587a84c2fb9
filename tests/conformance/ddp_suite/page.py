"""docs/conformance.md, made from outcomes alone: no dates, no durations; equal outcomes give equal pages."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.conformance.ddp_suite.applicability import NEEDS_GPU, PRIVATE, REFUSALS
from tests.conformance.ddp_suite.bench import IMPLEMENTATIONS
from tests.conformance.ddp_suite.ranks import Outcome
from tests.conformance.ddp_suite.selection import GROUPS, SuiteTest, select_tests

PAGE = Path(__file__).parents[3] / "docs" / "conformance.md"
DOCUMENTED_WORLD_SIZES = (2, 3)
Results = dict[tuple[str, int, str], Outcome]  # by implementation, world size, test

_COLUMNS = [(implementation, size) for implementation in IMPLEMENTATIONS for size in DOCUMENTED_WORLD_SIZES]
_WORDS = {"pass": "passes", "fail": "**fails**", "hang": "**hangs**", "skip": "n/a"}
_HEAD = """# Conformance with torch's DistributedDataParallel

The wheel of torch ships the tests of its distributed package. `tests/conformance/ddp_suite` runs those that
use `DistributedDataParallel`, `SyncBatchNorm` or `join`, over Gloo on CPU, once with torch's own classes and
once with samestep's in their places. Tests written for GPUs get the CPU where they ask for a CUDA device, and
decorators that skip them are disarmed, also where torch's own CI skips a test on Linux (marked †). What the
tests assert is not changed; one test's images of 1000 x 1000 are cut to 24 x 24.

This page is written by

    python -m tests.conformance.ddp_suite --write-docs

with torch {version}. *n/a*: the test cannot apply; the reasons are below.
"""


def render(results: Results) -> str:
    """The page for `results`, which hold every selected test for every implementation and world size."""
    parts = [_HEAD.format(version=torch.__version__.split("+")[0]), _totals(results)]
    for group in GROUPS:
        tests = [test for test in select_tests() if test.group == group]
        parts.append(f"## {group}\n\n{_table(tests, results)}")
    parts += [_failures(results), _reasons(results)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _header(first: str) -> list[str]:
    titles = [f"{implementation}, {size} ranks" for implementation, size in _COLUMNS]
    return [_row([first, *titles]), _row(["---"] * (1 + len(titles)))]


def _totals(results: Results) -> str:
    lines = _header(f"{len(select_tests())} tests")
    for status in ("pass", "fail", "hang", "skip"):
        counts = [
            sum(results[(*column, test.name)].status == status for test in select_tests())
            for column in _COLUMNS
        ]
        lines.append(_row([_WORDS[status].strip("*"), *map(str, counts)]))
    return "## Totals\n\n" + "\n".join(lines)


def _table(tests: list[SuiteTest], results: Results) -> str:
    lines = _header("test")
    for test in tests:
        cells = [_WORDS[results[(*column, test.name)].status] for column in _COLUMNS]
        mark = " †" if test.is_skipped_upstream else ""
        lines.append(_row([f"`{test.name}`{mark}", *cells]))
    return "\n".join(lines)


def _failures(results: Results) -> str:
    """First lines of the errors, equal ones of one test told once."""
    lines = []
    for test in select_tests():
        columns_of: dict[str, list[str]] = {}
        for implementation, size in _COLUMNS:
            outcome = results[implementation, size, test.name]
            if outcome.status in ("fail", "hang"):
                columns_of.setdefault(outcome.detail[:160].replace("`", "'"), []).append(
                    f"{implementation} {size}"
                )
        lines += [f"- `{test.name}` ({', '.join(who)}): `{text}`" for text, who in columns_of.items()]
    return "## Errors\n\nThe first line of each.\n\n" + ("\n".join(lines) or "None.")


def _reasons(results: Results) -> str:
    parts = ["## Why a test cannot apply"]
    for title, table in (
        ("To no class, on CPU", NEEDS_GPU),
        ("To no class but torch's: private parts", PRIVATE),
        ("To samestep: the test asserts a refusal where samestep trains", REFUSALS),
    ):
        parts.append(f"{title}:\n\n" + "\n".join(f"- `{name}` {reason}" for name, reason in table.items()))
    tabled = NEEDS_GPU | PRIVATE | REFUSALS
    own = {
        f"- `{name}`, {size} ranks: {outcome.detail}"
        for (_, size, name), outcome in results.items()
        if outcome.status == "skip" and name not in tabled
    }
    if own:
        parts.append("For the number of ranks, by the test's own word:\n\n" + "\n".join(sorted(own)))
    return "\n\n".join(parts)
