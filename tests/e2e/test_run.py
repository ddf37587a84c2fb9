"""The real `samestep run`, typed as a person would."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher import GONE_S, script, wait_until_gone

SAMESTEP = [sys.executable, "-m", "samestep"]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "NO_COLOR")}


def test_two_ranks_reduce_then_one_fails_and_the_restart_succeeds(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.full((4,), float(dist.get_rank() + 1))
        dist.all_reduce(total)
        print("total", total.tolist(), "threads", torch.get_num_threads())
        dist.barrier()  # both have printed before one fails, and has the launcher end the other
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if rank == 1:
                raise ValueError("in mid-run")
            for _ in range(100):
                dist.all_reduce(total)  # waits for a rank that has gone
        dist.destroy_process_group()
        """,
    )
    command = [*SAMESTEP, "run", "--nproc", "2", "--max-restarts", "1", "script.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=55, env=environment()
    )
    assert ended.returncode == 0, ended.stderr
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    line = f"total [3.0, 3.0, 3.0, 3.0] threads {threads}"
    assert sorted(ended.stdout.splitlines()) == sorted(f"[rank {r}] {line}" for r in (0, 0, 1, 1))
    said, *report = [line for line in ended.stderr.splitlines() if not line.startswith("[rank")]
    assert said == f"samestep: 2 ranks on this host, {threads} thread(s) each"
    assert report[0].startswith("rank 1 of 2 failed: exit code 1 (host ")
    assert report[1] == "Traceback (most recent call last):"
    assert "ValueError: in mid-run" in report
    assert any(line.startswith("rank 0: ") for line in report)
    assert report[-1] == "restart 1 of 1"


@pytest.mark.parametrize("delay_s", [0.0, 0.4, 3.0])
def test_ctrl_c(tmp_path: Path, delay_s: float) -> None:
    """Also while the launcher imports torch, which takes it a second or two."""
    script(tmp_path, "print(os.getpid(), subprocess.Popen(['sleep', '600']).pid); time.sleep(600)")
    with subprocess.Popen(
        [*SAMESTEP, "run", "--nproc", "2", "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        start_new_session=True,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        pids = [int(word) for _ in range(2) for word in launcher.stdout.readline().split()[2:]]
        time.sleep(delay_s)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(GONE_S) == 130
        assert b"Traceback" not in launcher.stdout.read() + launcher.stderr.read()
    assert wait_until_gone(pids) == []


def test_a_terminal_shows_lines_above_one_bar(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import samestep
        bar = samestep.progress(range(40), description="epoch 1")
        for i in bar:
            bar.show(loss=1 / (i + 1))
            time.sleep(0.1 if rank == 0 else 0.01)
            if i % 10 == 0:
                print("line", i)
        """,
    )
    seen, status = in_terminal(tmp_path, [*SAMESTEP, "run", "--nproc", "2", "script.py"])
    assert status == 0
    assert "\x1b[1A\r\x1b[0J" in seen  # the bar was drawn anew
    shown = on_screen(seen)
    lines = [line for line in shown if line.startswith("[rank ")]
    assert sorted(lines) == sorted(f"[rank {r}] line {i}" for r in range(2) for i in (0, 10, 20, 30))
    (bar,) = [line for line in shown if "epoch 1" in line]
    assert bar.startswith("epoch 1 ")
    assert "40/40" in bar
    assert "loss 0.025" in bar


def in_terminal(folder: Path, command: list[str]) -> tuple[str, int]:
    """What `command` writes to a terminal of 100 columns, and its exit status."""
    master, slave = pty.openpty()
    variables = {**environment(), "TERM": "xterm", "COLUMNS": "100"}
    seen = b""
    with subprocess.Popen(command, cwd=folder, stdout=slave, stderr=slave, env=variables) as process:
        os.close(slave)
        with contextlib.suppress(OSError):  # how Linux says that nobody has the other end open
            while data := os.read(master, 1 << 16):
                seen += data
    os.close(master)
    return seen.decode(), process.returncode


def on_screen(seen: str) -> list[str]:
    """The lines that a terminal shows in the end, without colours."""
    lines: list[str] = []
    for part in re.split(r"(\x1b\[\d+A\r\x1b\[0J|\r?\n)", seen):
        if match := re.match(r"\x1b\[(\d+)A", part):
            del lines[len(lines) - int(match[1]) :]
        elif part.strip():
            lines.append(re.sub(r"\x1b\[[\d;]*m", "", part))
    return lines
