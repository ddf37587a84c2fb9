"""torch's own tests of data parallelism, run on samestep's classes: what torch's pass, ours pass.

One process has torch's suite imported and forks two ranks for each test. Three ranks, and the table of all
outcomes: `python -m tests.conformance.ddp_suite --help`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.ddp_suite.applicability import NEEDS_GPU, NOT_FOR_SAMESTEP
from tests.conformance.ddp_suite.selection import select_tests

Ask = Callable[[str], dict[str, Any]]
_NAMES = [test.name for test in select_tests()]
_APPLICABLE = [name for name in _NAMES if name not in NEEDS_GPU | NOT_FOR_SAMESTEP]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Asks the process that runs the suite what becomes of a test."""
    errors = tmp_path_factory.mktemp("ddp_suite") / "stderr"
    command = [sys.executable, "-m", "tests.conformance.ddp_suite", "--serve", "--world-size=2"]
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=Path(__file__).parents[2],
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def run(name: str) -> dict[str, Any]:
            requests.write(f"{name}\n")
            requests.flush()
            answer = answers.readline()
            assert answer, f"the process that runs the suite died:\n{errors.read_text()}"
            return json.loads(answer)

        yield run
        requests.close()


def test_tables_name_tests_of_the_suite() -> None:
    assert set(NEEDS_GPU | NOT_FOR_SAMESTEP) <= set(_NAMES)
    assert len(_APPLICABLE) >= 80


@pytest.mark.timeout(300)  # more than any test may take
@pytest.mark.parametrize("name", _APPLICABLE)
def test_samestep_passes_what_torch_passes(name: str, ask: Ask) -> None:
    answer = ask(name)
    ours = answer["samestep"]
    if ours["status"] in ("fail", "hang"):
        torchs = answer["torch"]
        if torchs["status"] == "pass":
            pytest.fail(f"{ours['status']}: {ours['detail']}\n{ours['log']}", pytrace=False)
        pytest.skip(f"torch's own class: {torchs['status']}, {torchs['detail']}")
