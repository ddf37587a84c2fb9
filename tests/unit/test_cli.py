"""The command line: what it says to a person, before torch is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import samestep

# Runs the command line once for each list of arguments, in one interpreter, and says what came of it.
DRIVER = """
import contextlib, io, json, sys
from samestep.cli import main
results = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["samestep", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            results.append([end.code, out.getvalue(), err.getvalue(), "torch" in sys.modules])
print(json.dumps(results))
"""

BAD = [
    (["run", "no_such_script.py"], "samestep: there is no script no_such_script.py"),
    (["run", "--nproc", "0", "train.py"], "samestep: --nproc 0: give a number from 1"),
    (["run", "--nproc", "-3", "train.py"], "samestep: --nproc -3: give a number from 1"),
    (["run", "--nproc", "x", "train.py"], "samestep: --nproc x: give a number from 1"),
    (["run", "--max-restarts", "-1", "train.py"], "samestep: --max-restarts -1: give 0 or more"),
    (["run", "--max-restarts", "x", "train.py"], "samestep: Invalid value for '--max-restarts'"),
    (["run", "--nnodes", "2", "train.py"], "samestep: --nnodes needs --rdzv-endpoint"),
    (["run", "--nnodes", "0", "train.py"], "samestep: --nnodes 0: give a number of hosts"),
    (["run", "--rdzv-endpoint", "h:x", "train.py"], "samestep: --rdzv-endpoint h:x: give HOST:PORT"),
    (["run", "--log-dir", "train.py", "train.py"], "samestep: --log-dir train.py is not a directory"),
    (["run", "-m", "no.such.module"], "samestep: -m no.such.module: there is no module 'no'"),
    (["run", "--grace", "-1", "train.py"], "samestep: --grace -1.0: give a number of seconds from 0"),
    (["run", "--grace", "nan", "train.py"], "samestep: --grace nan: give a number of seconds from 0"),
    (["run", "."], "samestep: . is a directory"),
    (["run"], "samestep: Missing argument 'SCRIPT'"),
    (["run", "--no-such-option", "train.py"], "samestep: No such option"),
    (["rnu", "train.py"], "samestep: No such command 'rnu'"),
    (["bench", "--model", "mpl"], "samestep: --model mpl: there is no such model; name FILE.py:FUNCTION"),
    (["bench", "--model", "no.py:make"], "samestep: --model no.py:make: no.py cannot be read: No such"),
    (["bench", "--model", "train.py:make"], "samestep: --model train.py:make: train.py defines no function"),
    (["bench", "--model", "bad.py:make"], "samestep: --model bad.py:make: bad.py is not Python"),
    (["bench", "--rounds", "0"], "samestep: Invalid value for '--rounds'"),
    (["bench", "--nproc", "0"], "samestep: --nproc 0: give a number from 1"),
    (["verify", "A"], "samestep: Missing argument 'B'"),
    (["checkpoint", "shw", "A"], "samestep: No such command 'shw'"),
    (["checkpoint", "export", "A", "B", "--format", "zip"], "samestep: Invalid value for '--format'"),
    (["checkpoint", "import", "A", "B", "--step", "-1"], "samestep: Invalid value for '--step'"),
    (["bench", "--json", "no/folder.json"], "samestep: --json no/folder.json: there is no such folder"),
]
GOOD = [
    ["--help"],
    ["run", "--help"],
    ["--version"],
    [],
    ["bench", "--help"],
    ["verify", "--help"],
    ["checkpoint", "--help"],
    ["checkpoint", "export", "--help"],
    ["checkpoint", "import", "--help"],
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, str, bool]]:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "train.py").write_text("")
    (folder / "bad.py").write_text("def make(:")
    arguments = json.dumps([*(bad for bad, _ in BAD), *GOOD])
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [tuple(result) for result in json.loads(ended.stdout)]


@pytest.mark.parametrize("index", range(len(BAD)), ids=[" ".join(bad) for bad, _ in BAD])
def test_bad_input_is_one_line_and_status_2(results: list[tuple[int, str, str, bool]], index: int) -> None:
    status, out, err, has_torch = results[index]
    assert (status, out, has_torch) == (2, "", False)
    assert err.startswith(BAD[index][1])
    assert err.count("\n") == 1


def test_help_and_version_need_no_torch(results: list[tuple[int, str, str, bool]]) -> None:
    general, run, version, nothing, bench, verify, checkpoint, export, import_ = results[len(BAD) :]
    assert all(result[0] == 0 and result[2] == "" and not result[3] for result in results[len(BAD) :])
    assert version[1] == f"samestep {samestep.__version__}\n"
    assert nothing[1] == general[1]
    for option in (
        "--nproc",
        "--nnodes",
        "--rdzv-endpoint",
        "--rdzv-id",
        "--max-restarts",
        "--log-dir",
        "--grace",
        "-m",
    ):
        assert option in run[1]
    assert "samestep run --nproc 4 train.py" in run[1]
    for option in ("--nproc", "--backend", "--model", "--rounds", "--json"):
        assert option in bench[1]
    assert "Usage: samestep verify [OPTIONS] A B" in verify[1]
    assert "0 yes, 1 no, 2" in verify[1]
    for command in ("run", "bench", "verify", "checkpoint"):
        assert f"\n  {command} " in general[1]
    for command in ("show", "verify", "export", "import"):
        assert f"\n  {command} " in checkpoint[1]
    for option in ("--format [pt|safetensors|dcp]", "--entry NAME"):
        assert option in export[1]
    for option in ("--format [pt|safetensors|dcp]", "--step N"):
        assert option in import_[1]
    assert max(map(len, (run[1] + bench[1]).splitlines())) <= 100


def test_verify_and_checkpoint_commands(tmp_path: Path) -> None:
    """The statuses of a script's `samestep verify A B && ...`, and there and back through another format."""
    import torch

    from samestep import checkpoint

    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        checkpoint.save(tmp_path / name, {"model": {"w": torch.full((2,), value)}}, step=1)
    commands = [
        ["verify", "a", "b"],
        ["verify", "a", "c"],
        ["verify", "a", "no"],
        ["checkpoint", "show", "a"],
        ["checkpoint", "verify", "a"],
        ["checkpoint", "export", "a", "w.pt"],
        ["checkpoint", "import", "w.pt", "d"],
        ["verify", "a", "d"],
    ]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER, json.dumps(commands)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    results = json.loads(ended.stdout)
    assert [result[0] for result in results] == [0, 1, 2, 0, 0, 0, 0, 0]
    assert results[0][1] == "the same: 1 tensors, 8 bytes, bit by bit\n"
    assert results[1][1].startswith("model['w'] differs at [0]: 1.0 and 2.0 (bits 0x3f800000 and 0x40000000)")
    assert results[2][2].startswith("samestep: there is no checkpoint at no")
    assert "model/w" in results[3][1]
    assert [result[1] for result in results[5:7]] == ["w.pt\n", "d/step-000000001\n"]


def test_gpu_without_gpu(tmp_path: Path) -> None:
    import torch

    from samestep.errors import LaunchError
    from samestep.launch.options import resolve_nproc

    if torch.accelerator.is_available():
        assert resolve_nproc("gpu") == torch.accelerator.device_count()
    else:
        with pytest.raises(LaunchError, match="no GPU is visible to torch here"):
            resolve_nproc("gpu")
