"""A rank fails in the middle of training: the others wait for it in a collective, and are not blamed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

_SCRIPT = """
import sys
import torch
import samestep

with samestep.World(backend=sys.argv[1]) as world:
    model = samestep.DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(100):
        if world.rank == 1 and step == 3:
            1 / 0  # the cause
        model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_rank_that_failed_first_is_named_first(tmp_path: Path, backend: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    start = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-m", "samestep", "run", "--nproc", "2", str(script), backend],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    lines = [line for line in run.stderr.splitlines() if not line.startswith("samestep: 2 ranks")]
    assert run.returncode == 1, run.stderr
    assert lines[0].startswith("rank 1 of 2 failed: exit code 1"), run.stderr
    assert lines[1] == "Traceback (most recent call last):"
    assert "    1 / 0  # the cause" in lines
    assert "ZeroDivisionError: division by zero" in lines
    assert lines[-1].startswith("rank 0: "), run.stderr
    assert time.monotonic() - start < 150  # the group's time-out is ten minutes: nobody waited for it
