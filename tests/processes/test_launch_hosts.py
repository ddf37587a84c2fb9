"""Several launchers, one world: each stands for a host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher import Launched, launch, script
from samestep.launch.loopback import listen

Both = Callable[..., tuple[Launched, Launched]]


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    """Starts `script.py` with two launchers of two ranks each."""
    with listen() as listener:  # free again a moment later: the two have to be told the same port
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    with contextlib.ExitStack() as stack:

        def start(*options: str) -> tuple[Launched, Launched]:
            common = [
                "run",
                "--nproc",
                "2",
                "--nnodes",
                "2",
                "--rdzv-endpoint",
                endpoint,
                *options,
                "script.py",
            ]
            first, second = (stack.enter_context(launch(tmp_path, *common, name=name)) for name in "ab")
            return first, second

        yield start


def test_two_launchers_are_one_world(tmp_path: Path, both: Both) -> None:
    script(tmp_path, "print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GROUP_RANK')))")
    first, second = both()
    assert (first.wait(), second.wait()) == (0, 0)
    lines = sorted((first.stdout + second.stdout).splitlines())
    assert lines == [f"[rank {r}] {r} {r % 2} 4 {r // 2}" for r in range(4)]


def test_a_failure_on_one_host_is_told_on_both(tmp_path: Path, both: Both) -> None:
    script(
        tmp_path,
        """
        if rank == 3:
            raise ValueError("far away")
        time.sleep(600)
        """,
    )
    first, second = both()
    for launched in (first, second):
        assert launched.wait() == 1
        lines = [line for line in launched.stderr.splitlines() if not line.startswith("samestep:")]
        assert lines[0].startswith("rank 3 of 4 failed: exit code 1")
        assert "ValueError: far away" in lines
        assert [line for line in lines if line.startswith("rank ")][1:] == [
            f"rank {rank}: ended by the launcher" for rank in range(3)
        ]


def test_a_host_that_finished_learns_of_a_later_failure(tmp_path: Path, both: Both) -> None:
    script(tmp_path, "time.sleep(rank * 0.5); sys.exit(5 if rank == 3 else 0)")
    first, second = both()
    assert (first.wait(), second.wait()) == (5, 5)


def test_restart_on_two_hosts(tmp_path: Path, both: Both) -> None:
    script(
        tmp_path,
        """
        restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print("port", os.environ["MASTER_PORT"])
        if not os.path.exists("failed"):
            if rank == 3:
                time.sleep(0.5)
                open("failed", "w").close()
                raise ValueError("once")
            time.sleep(600)
        """,
    )
    first, second = both("--max-restarts", "1")
    assert (first.wait(), second.wait()) == (0, 0)
    ports = {line.split()[3] for line in (first.stdout + second.stdout).splitlines()}
    assert len(ports) == 2  # each attempt has a store of its own
    assert (first.stderr + second.stderr).count("restart 1 of 1") == 1
