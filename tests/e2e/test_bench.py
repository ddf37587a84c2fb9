"""`samestep bench` with a model of the user's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

OWN = """
import torch
from torch import nn
from beside import WIDTH

def make(device):
    inputs = torch.randn(4, WIDTH, device=device)
    return nn.Linear(WIDTH, 3).to(device), lambda model: model(inputs).square().mean()
"""


@pytest.mark.timeout(240)
def test_bench_times_a_model_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    (folder / "beside.py").write_text("WIDTH = 5\n")
    model = "project/own.py:make"
    command = ["bench", "--nproc", "2", "--model", model, "--rounds", "2", "--json", "out.json"]
    ended = subprocess.run(
        [sys.executable, "-m", "samestep", *command],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=200,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["num_ranks"] == 2
    times = record["seconds_per_step"][model]
    expected = ["unsynchronised", f"torch DDP, {record['backend']}", f"samestep, {record['backend']}"]
    if record["backend"] == "shm":
        expected.insert(1, "torch DDP, gloo")
    assert list(times) == expected
    assert all(len(figures) == 2 and min(figures) > 0 for figures in times.values())
    assert f"{model}: synchronising adds " in ended.stdout
    assert not torch.accelerator.is_available() or record["device"] != "cpu"
