"""Signals to the launcher, and its own death."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from launcher import GONE_S, launch, script, wait_until_gone

SLEEPING = """
    {prepare}
    child = subprocess.Popen(["sleep", "600"])
    print(os.getpid(), child.pid)
    {wait}
"""
IGNORING = "for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("prepare", ["", IGNORING], ids=["ordinary", "ignoring"])
def test_one_signal_ends_everything_quietly(tmp_path: Path, signum: int, prepare: str) -> None:
    script(tmp_path, SLEEPING.format(prepare=prepare, wait="time.sleep(600)"))
    options = ["--nproc", "2", "--grace", "1"]
    with launch(tmp_path, "run", *options, "script.py", OMP_NUM_THREADS="1") as launched:
        lines = launched.wait_for_lines(2)
        sent_s = time.monotonic()
        launched.send(signum)
        status = launched.wait()
        assert time.monotonic() - sent_s < GONE_S
        assert status == 128 + signum
        assert launched.stderr == ""
        assert wait_until_gone([int(word) for line in lines for word in line[2:]]) == []


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3])
def test_a_signal_while_everything_is_starting(tmp_path: Path, delay_s: float) -> None:
    script(tmp_path, SLEEPING.format(prepare="", wait="time.sleep(600)"))
    with launch(tmp_path, "run", "--nproc", "2", "script.py", OMP_NUM_THREADS="1") as launched:
        while not launched.stderr and launched.process.is_alive() and not launched.process.exitcode:
            if Path(f"/proc/{launched.process.pid}/task/{launched.process.pid}/children").read_text().strip():
                break  # the first rank has been started
        time.sleep(delay_s)
        launched.send(signal.SIGINT)
        assert launched.wait(GONE_S) == 130
        assert "Traceback" not in launched.stderr + launched.stdout


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    script(tmp_path, SLEEPING.format(prepare=IGNORING, wait="time.sleep(600)"))
    with launch(tmp_path, "run", "--nproc", "2", "script.py") as launched:
        lines = launched.wait_for_lines(2)
        launched.send(signal.SIGINT)
        time.sleep(0.2)
        sent_s = time.monotonic()
        launched.send(signal.SIGINT)
        assert launched.wait() == 130
        assert time.monotonic() - sent_s < 1.5  # the first one alone would take 2
        assert wait_until_gone([int(word) for line in lines for word in line[2:]]) == []


def test_a_script_may_save_when_interrupted(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        print("ready")
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            time.sleep(0.5)
            print("saved")
        """,
    )
    with launch(tmp_path, "run", "--nproc", "2", "script.py") as launched:
        launched.wait_for_lines(2)
        launched.send(signal.SIGINT)
        assert launched.wait() == 130
        assert launched.stdout.count("saved") == 2


def test_killed_launcher_takes_the_ranks_and_their_children_along(tmp_path: Path) -> None:
    script(tmp_path, SLEEPING.format(prepare=IGNORING, wait="time.sleep(600)"))
    with launch(tmp_path, "run", "--nproc", "2", "script.py") as launched:
        lines = launched.wait_for_lines(2)
        launched.send(signal.SIGKILL)
        launched.wait()
        assert wait_until_gone([int(word) for line in lines for word in line[2:]]) == []


def test_user_signals_reach_the_ranks(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        def save(signum, frame):
            print("saving on", signal.Signals(signum).name)
            sys.exit(0)
        signal.signal(signal.SIGUSR1, save)
        print("ready")
        time.sleep(600)
        """,
    )
    with launch(tmp_path, "run", "--nproc", "2", "script.py") as launched:
        launched.wait_for_lines(2)
        launched.send(signal.SIGUSR1)
        assert launched.wait() == 0
        assert launched.stdout.count("saving on SIGUSR1") == 2
