"""What the ranks print arrives whole, once, and with its rank."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from launcher import launch, run, script


def test_lines_of_four_ranks_are_whole_and_complete(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        for i in range(4000):
            line = f"{rank}:{i}:" + str(rank) * (i * 37 % 300)
            print(line, file=(sys.stdout, sys.stderr)[i % 2])
        """,
    )
    launched = run(tmp_path, "run", "--nproc", "4", "script.py", OMP_NUM_THREADS="1")
    assert launched.status == 0
    for parity, text in ((0, launched.stdout), (1, launched.stderr)):
        for rank in range(4):
            mine = [line for line in text.splitlines() if line.startswith(f"[rank {rank}] ")]
            assert mine == [
                f"[rank {rank}] {rank}:{i}:" + str(rank) * (i * 37 % 300) for i in range(parity, 4000, 2)
            ]
        assert len(text.splitlines()) == 8000


def test_odd_bytes_survive(tmp_path: Path) -> None:
    script(
        tmp_path,
        r"""
        os.write(1, b"latin \xe9 and nul \x00\n" + b"\n" + b"two\r\n")
        os.write(1, b"x" * 3_000_000 + b"\n")
        os.write(1, b"10 %\r20 %\rdone\n")
        os.write(1, b"\x1b_samestep:{not json\x1b\\" + b"kept \x1b_other\x1b\\\n")
        os.write(1, b"\x1b_samestep:" + b"y" * 10_000 + b"\n")
        os.write(1, b"no end")
        """,
    )
    launched = run(tmp_path, "run", "--nproc", "1", "--log-dir", "logs", "script.py")
    assert launched.status == 0
    lines = launched.stdout_bytes().split(b"\n")
    assert lines[:3] == [b"[rank 0] latin \xe9 and nul \x00", b"[rank 0] ", b"[rank 0] two"]
    assert lines[3] == b"[rank 0] " + b"x" * 3_000_000
    assert lines[4:6] == [b"[rank 0] 10 %", b"[rank 0] done"]
    assert lines[6] == b"[rank 0] kept \x1b_other\x1b\\"
    assert lines[7] == b"[rank 0] \x1b_samestep:" + b"y" * 10_000
    assert lines[8:] == [b"[rank 0] no end", b""]
    log = (tmp_path / "logs" / "rank_0" / "stdout.log").read_bytes().split(b"\n")
    assert [b"[rank 0] " + line for line in log[:4]] == lines[:4]
    assert log[4:7] == [b"10 %", b"20 %", b"done"]


def test_the_last_words_of_a_killed_rank_come_before_the_report(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        os.write(2, b"".join(b"line %d\\n" % i for i in range(3000)) + b"unfinished")
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    lines = run(tmp_path, "run", "--nproc", "1", "script.py").stderr.splitlines()
    assert lines[2999:3001] == ["[rank 0] line 2999", "[rank 0] unfinished"]
    assert lines[3001].startswith("rank 0 of 1 failed: killed by SIGKILL")


def test_logs_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    script(tmp_path, "print(sys.argv[1]); print('err', file=sys.stderr)")
    for word in ("first", "second"):
        assert run(tmp_path, "run", "--nproc", "2", "--log-dir", "a/b", "script.py", word).status == 0
    for rank in range(2):
        folder = tmp_path / "a" / "b" / f"rank_{rank}"
        assert (folder / "stdout.log").read_text() == "first\nsecond\n"
        assert (folder / "stderr.log").read_text() == "err\nerr\n"


def test_a_reader_that_goes_away_ends_the_run_as_it_ends_a_program(tmp_path: Path) -> None:
    script(tmp_path, "while True: print('y' * 100)")
    os.mkfifo(tmp_path / "fifo")
    with launch(tmp_path, "run", "--nproc", "2", "script.py", main="launcher:main_into_fifo") as launched:
        with (tmp_path / "fifo").open("rb", buffering=0) as fifo:
            assert fifo.read(10).startswith(b"[rank ")
        assert launched.wait() == 141


def test_a_world_of_one_is_prefixed_too_and_its_arguments_pass_untouched(tmp_path: Path) -> None:
    script(tmp_path, "print(sys.argv[1:], rank)")
    arguments = ["--nproc", "7", "-m", "--help", "--", "a b", ""]
    launched = run(tmp_path, "run", "script.py", *arguments)
    assert launched.stdout == f"[rank 0] {arguments} 0\n"
    assert launched.stderr == ""


def test_no_thread_or_descriptor_is_left_behind(tmp_path: Path) -> None:
    from samestep.launch.output import Output

    num_fds, num_threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    with Output(tmp_path) as output:
        output.drain(0.1)
    assert len(list(Path("/proc/self/fd").iterdir())) == num_fds
    assert threading.active_count() == num_threads
