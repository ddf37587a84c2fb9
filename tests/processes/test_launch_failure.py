"""A rank fails: who was first, what is printed, and what is left of the others."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launcher import GONE_S, launch, run, script, wait_until_gone

CHILDREN = """
    kinds = [dict(), dict(start_new_session=True)]
    children = [subprocess.Popen(["sleep", "600"], **kind).pid for kind in kinds]
    # An orphan in a session of its own: its parent, a shell, ends at once.
    command = "setsid sleep 600 >/dev/null 2>&1 & echo $!"
    children.append(int(subprocess.run(command, shell=True, stdout=subprocess.PIPE).stdout))
    print(os.getpid(), *children)
"""


def test_traceback_of_the_failed_rank_comes_first_and_no_process_is_left(tmp_path: Path) -> None:
    script(
        tmp_path,
        CHILDREN
        + """
    def step():
        raise ValueError(f"a bad batch on rank {rank}")
    if rank == 1:
        while not all(os.path.exists(f"ready{r}") for r in (0, 2)):
            time.sleep(0.01)
        print("failing", time.time())
        step()
    open(f"ready{rank}", "w").close()
    time.sleep(600)
    """,
    )
    launched = run(tmp_path, "run", "--nproc", "3", "script.py")
    ended_s = time.time()
    assert launched.status == 1
    lines = [line.split() for line in launched.stdout.splitlines()]
    failed_s = next(float(line[3]) for line in lines if line[2] == "failing")
    assert ended_s - failed_s < GONE_S
    pids = [int(word) for line in lines if line[2] != "failing" for word in line[2:]]
    assert len(pids) == 12
    assert wait_until_gone(pids) == []
    report = [line for line in launched.stderr.splitlines() if not line.startswith("samestep:")]
    assert report[0].startswith("rank 1 of 3 failed: exit code 1 (host ")
    assert report[1] == "Traceback (most recent call last):"
    assert 'script.py", line' in report[2]
    assert "worker.py" not in launched.stderr
    assert "ValueError: a bad batch on rank 1" in report
    assert report[-2:] == ["rank 0: ended by the launcher", "rank 2: ended by the launcher"]


def test_children_of_a_rank_that_succeeds_end_with_it(tmp_path: Path) -> None:
    script(tmp_path, CHILDREN + "\n    if rank == 0: time.sleep(600)")
    with launch(tmp_path, "run", "--nproc", "2", "script.py") as launched:
        lines = launched.wait_for_lines(2)
        children = next([int(word) for word in line[2:]] for line in lines if line[1] == "1]")
        assert wait_until_gone(children[:2]) == []  # the session's; the others when the run ends
        assert launched.process.is_alive()
        launched.send(15)
        assert launched.wait() == 143
    assert wait_until_gone([int(word) for line in lines for word in line[2:]]) == []


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("sys.exit(7)", 7, "failed: exit code 7"),
        ("sys.exit('no data here')", 1, "SystemExit: no data here"),
        ("os._exit(9)", 9, "failed: exit code 9"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "killed by SIGSEGV"),
        ("raise KeyboardInterrupt", 130, "killed by SIGINT"),
        ("import atexit; atexit.register(time.sleep, 600); 1 / 0", 1, "ZeroDivisionError"),
        ("import threading; threading.Thread(target=time.sleep, args=[600]).start(); 1 / 0", 1, "ZeroDiv"),
        ("sys.excepthook = lambda *_: print('hook'); 1 / 0", 1, "ZeroDivisionError"),
        ("sys.excepthook = None; 1 / 0", 1, "ZeroDivisionError"),
        ("class E(Exception): __str__ = None\n    raise E", 1, "Traceback"),
        ("raise RuntimeError('\\udc80 \\u20ac')", 1, "RuntimeError"),
    ],
)
def test_ways_to_fail(tmp_path: Path, text: str, status: int, message: str) -> None:
    # The other rank would go on for ever.
    script(tmp_path, f"if rank == 1:\n    {text}\ntime.sleep(600)")
    started_s = time.monotonic()
    launched = run(tmp_path, "run", "--nproc", "2", "script.py")
    assert launched.status == status
    assert message in launched.stderr
    assert "rank 1 of 2 failed" in launched.stderr
    assert "rank 0: ended by the launcher" in launched.stderr
    assert ("[rank 1] hook\n" in launched.stdout) == ("hook" in text and "print" in text)
    assert time.monotonic() - started_s < 30


def test_sys_exit_0_none_and_falling_off_the_end_are_success(tmp_path: Path) -> None:
    script(tmp_path, "import atexit; atexit.register(print, 'at exit'); [sys.exit, exit, id][rank](0)")
    launched = run(tmp_path, "run", "--nproc", "3", "script.py", OMP_NUM_THREADS="1")
    assert (launched.status, launched.stderr) == (0, "")
    assert sorted(launched.stdout.splitlines()) == [f"[rank {rank}] at exit" for rank in range(3)]


def test_a_lost_connection_is_never_the_cause(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        if rank == 0:
            raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1234")
        if rank == 1:
            time.sleep(0.4)  # it is busy leaving its `with` blocks
            raise KeyError("the cause")
        time.sleep(600)
        """,
    )
    launched = run(tmp_path, "run", "--nproc", "3", "script.py")
    assert launched.status == 1
    assert launched.stderr.splitlines()[1].startswith("rank 1 of 3 failed")
    assert "rank 0: failed later, rank 1 being gone: RuntimeError: [pair.cc:553]" in launched.stderr
    assert "rank 2: ended by the launcher" in launched.stderr


def test_the_first_of_several_failures_is_the_earliest(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        if rank == 2:
            open("failing", "w").close()
            raise ValueError("first")
        while not os.path.exists("failing"):
            time.sleep(0.001)
        time.sleep(0.05)
        raise ValueError("second")
        """,
    )
    launched = run(tmp_path, "run", "--nproc", "3", "script.py")
    assert launched.stderr.splitlines()[1].startswith("rank 2 of 3 failed")
    assert "ValueError: first" in launched.stderr


@pytest.mark.parametrize("text", ["def f(:", "\x00", "# -*- coding: nonsense -*-"])
def test_script_that_does_not_compile(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    launched = run(tmp_path, "run", "broken.py")
    assert launched.status == 1
    assert "SyntaxError" in launched.stderr or "ValueError" in launched.stderr
    assert "worker.py" not in launched.stderr


def test_restarts_are_told_and_counted(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", restart, os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_MAX_RESTARTS"])
        if restart != "2" and rank == 1:
            raise ValueError("again")
        if restart != "2":
            time.sleep(600)
        """,
    )
    launched = run(tmp_path, "run", "--nproc", "2", "--max-restarts", "2", "--log-dir", "logs", "script.py")
    assert launched.status == 0
    assert launched.stderr.count("rank 1 of 2 failed") == 2
    assert [line for line in launched.stderr.splitlines() if line.startswith("restart")] == [
        "restart 1 of 2",
        "restart 2 of 2",
    ]
    attempts = [line.split() for line in launched.stdout.splitlines() if line.startswith("[rank 1]")]
    assert [attempt[3] for attempt in attempts] == ["0", "1", "2"]
    assert {attempt[5] for attempt in attempts} == {"2"}
    log = (tmp_path / "logs" / "rank_1" / "stdout.log").read_text().splitlines()
    assert [line.split()[1] for line in log] == ["0", "1", "2"]
    assert (tmp_path / "logs" / "rank_1" / "stderr.log").read_text().count("ValueError: again") == 2


def test_restarts_used_up(tmp_path: Path) -> None:
    script(tmp_path, "sys.exit(3)")
    launched = run(tmp_path, "run", "--max-restarts", "1", "script.py")
    assert launched.status == 3
    assert launched.stderr.count("rank 0 of 1 failed: exit code 3") == 2
