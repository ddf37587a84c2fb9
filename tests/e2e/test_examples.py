"""The examples do what they say, under every launcher that they name: the real commands, in subprocesses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
BIN = Path(sys.executable).parent  # not resolved: a virtual environment's own commands lie beside its python
SAMESTEP_RUN = [str(BIN / "samestep"), "run", "--nproc", "2"]
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
PYTHON = [sys.executable]
LAUNCHERS_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}

# Some seconds each on an idle machine.
pytestmark = pytest.mark.timeout(480)


def run(launcher: list[str], example: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCHERS_VARIABLES}
    ended = subprocess.run(
        [*launcher, str(EXAMPLES / example), *arguments],
        cwd=cwd,
        env=variables | {"PYTHONUTF8": "1", "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=220,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended


def accuracies(ended: subprocess.CompletedProcess[str]) -> tuple[float, float]:
    """Test accuracy of the trained model and of the one loaded from the checkpoint, in per cent."""
    trained, loaded = re.findall(r"accuracy[^\d]*([\d.]+)%", ended.stdout)
    return float(trained), float(loaded)


def test_digits_are_learned_on_two_ranks_and_a_run_resumes_on_one(tmp_path: Path) -> None:
    ended = run(SAMESTEP_RUN, "digits.py", "--epochs", "12", cwd=tmp_path)
    trained, loaded = accuracies(ended)
    assert trained >= 97.0
    assert loaded == trained
    assert "Warning" not in ended.stderr
    assert "276/276" in ended.stderr  # the progress bar's last state
    assert "2 (shm, cpu)" in ended.stdout
    (checkpoint,) = re.findall(r"runs/digits/step-\d+", ended.stdout)
    assert (tmp_path / checkpoint / "model.safetensors").is_file()

    ended = run(PYTHON, "digits.py", "--epochs", "13", "--resume", cwd=tmp_path)
    assert "13 (299 steps)" in ended.stdout
    assert "23/23" in ended.stderr  # one epoch, not thirteen
    assert "1 (shm, cpu)" in ended.stdout
    trained, loaded = accuracies(ended)
    assert loaded == trained >= 97.0


def test_digits_start_anew_under_torchrun(tmp_path: Path) -> None:
    notes = tmp_path / "runs" / "digits" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("no checkpoint, so none of the example's business")
    notes.with_name("step-000009999").mkdir()  # would be taken for the latest one
    trained, loaded = accuracies(run(TORCHRUN, "digits.py", "--epochs", "12", cwd=tmp_path))
    assert loaded == trained >= 97.0
    names = {path.name for path in notes.parent.iterdir()}
    assert names == {"notes.txt", "step-000000230", "step-000000253", "step-000000276"}


def test_the_lesson_shows_what_it_says(tmp_path: Path) -> None:
    ended = run(SAMESTEP_RUN, "lesson.py", cwd=tmp_path)
    for rank in (0, 1):
        assert f"[rank {rank}] this is rank {rank} of 2" in ended.stdout
        assert f"my own gradient is {rank + 1}.0, the average is 1.5" in ended.stdout
        assert f"rank {rank} trains on 500 of the 1000 samples" in ended.stdout
    first, second = re.findall(r"the first weight is (\S+)", ended.stdout)
    assert first == second
    assert ended.stdout.count("Answer: (c)") == 1  # rank 0 alone

    state = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert list(state) == ["weight", "bias"]  # no prefix of the wrapper's
    assert repr(state["weight"][0, 0].item()) == first
    torch.testing.assert_close(state["weight"], torch.ones(1, 8), atol=1e-3, rtol=0.0)


def test_the_weights_are_the_same_bits_on_any_number_of_processes_and_loader_workers(tmp_path: Path) -> None:
    def digests(launcher: list[str], *arguments: str) -> list[str]:
        output = run(launcher, "same.py", "--epochs", "1", *arguments, cwd=tmp_path).stdout
        return re.findall(r"\b[0-9a-f]{64}\b", output)

    alone = digests(PYTHON, "--workers", "1")
    assert len(set(alone)) == 2  # of the model and of the optimizer
    assert digests([*SAMESTEP_RUN[:-1], "3"]) == alone


def test_the_character_transformer_learns_and_writes(tmp_path: Path) -> None:
    ended = run(SAMESTEP_RUN, "chargpt.py", "--steps", "20", "--every", "10", cwd=tmp_path)
    after_10, after_20 = map(float, re.findall(r"on text not seen ([\d.]+)", ended.stdout))
    assert after_20 < after_10 < 4.5  # guessing costs log 96 = 4.56
    assert after_20 < 3.6
    assert "def " in ended.stdout
    assert {path.name for path in (tmp_path / "runs" / "chargpt").iterdir()} == {
        "step-000000010",
        "step-000000020",
    }


def test_the_resnet_learns_and_its_weights_fit_plain_batchnorm(tmp_path: Path) -> None:
    ended = run(SAMESTEP_RUN, "resnet.py", "--epochs", "3", "--width", "8", cwd=tmp_path)
    assert "135 steps on 2 ranks (shm)" in ended.stdout
    trained, loaded = map(float, re.findall(r"([\d.]+)%", ended.stdout))
    assert loaded == trained >= 30.0  # guessing: 10
    assert (tmp_path / "runs" / "resnet" / "step-000000135" / "model.safetensors").is_file()
