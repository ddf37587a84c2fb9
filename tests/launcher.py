"""`samestep run` in a process that has torch already: what a test starts, signals and reads.

The command line runs in a child of the forkserver (0.1 s) instead of a new interpreter (1.6 s). The ranks
are the real thing: new interpreters, started by the launcher.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samestep.testing import rank_context

GONE_S = 5.0  # everything has to be gone this long after a failure or a signal
PATIENCE_S = 45.0


class Launched:
    """A running launcher."""

    def __init__(self, folder: Path, process: Any, name: str) -> None:
        self.process = process
        self._folder = folder
        self._name = name

    @property
    def stdout(self) -> str:
        return self._read("out")

    @property
    def stderr(self) -> str:
        return self._read("err")

    def stdout_bytes(self) -> bytes:
        return (self._folder / f"{self._name}.out").read_bytes()

    def _read(self, stream: str) -> str:
        path = self._folder / f"{self._name}.{stream}"
        return path.read_text(errors="surrogateescape") if path.exists() else ""

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """Its exit status, as a shell would see it."""
        self.process.join(patience_s)
        assert self.process.exitcode is not None, f"still running\n{self.stdout}\n{self.stderr}"
        return int(self.process.exitcode)

    def wait_for_lines(self, count: int) -> list[list[str]]:
        """The words of the first `count` lines of standard output, as soon as they are there."""
        deadline = time.monotonic() + PATIENCE_S
        while self.stdout.count("\n") < count:
            assert time.monotonic() < deadline, f"{self.stdout}\n{self.stderr}"
            assert self.process.is_alive(), f"{self.stdout}\n{self.stderr}"
            time.sleep(0.02)
        return [line.split() for line in self.stdout.splitlines()[:count]]

    def send(self, signum: int) -> None:
        os.kill(self.process.pid, signum)


@contextlib.contextmanager
def launch(
    folder: Path, *arguments: str, main: str = "samestep.cli:main", name: str = "launched", **variables: str
) -> Iterator[Launched]:
    """The command line with `arguments`, running in `folder`; killed at the end of the block."""
    process = rank_context().Process(target=_main, args=(str(folder), name, main, arguments, variables))
    process.start()
    try:
        yield Launched(folder, process, name)
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        process.close()


def run(folder: Path, *arguments: str, **variables: str) -> Launched:
    """As `launch`, ended; `status` is its exit status."""
    with launch(folder, *arguments, **variables) as launched:
        launched.status = launched.wait()  # type: ignore[attr-defined]
        return launched


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    """A script in `folder`, with what most of them need imported."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    header = "import os, signal, subprocess, sys, time; rank = int(os.environ.get('RANK', '0'))\n"
    path.write_text(header + textwrap.dedent(text))
    return path


def is_gone(pid: int) -> bool:
    """Whether there is no such process; one that has ended and waits for its parent counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_until_gone(pids: list[int]) -> list[int]:
    """The processes of `pids` that are left after `GONE_S`."""
    deadline = time.monotonic() + GONE_S
    while (left := [pid for pid in pids if not is_gone(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _main(folder: str, name: str, main: str, arguments: tuple[str, ...], variables: dict[str, str]) -> None:
    os.chdir(folder)
    for number, stream in ((1, "out"), (2, "err")):
        file = os.open(f"{name}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    for variable in ("OMP_NUM_THREADS", "PYTHONUNBUFFERED", "GLOO_SOCKET_IFNAME"):
        os.environ.pop(variable, None)
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["samestep", *arguments]
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    module, _, function = main.partition(":")
    getattr(__import__(module, fromlist=[function]), function)()


def main_into_fifo() -> None:
    """The command line, its standard output a pipe named `fifo` in the working directory."""
    file = os.open("fifo", os.O_WRONLY)
    os.dup2(file, 1)
    os.close(file)
    from samestep.cli import main

    main()


def main_in_cgroup() -> None:
    """The command line, with the control group that TEST_CGROUP names for its memory."""
    (Path(os.environ["TEST_CGROUP"]) / "cgroup.procs").write_text(str(os.getpid()))
    from samestep.cli import main

    main()


def torchrun() -> None:
    """torch's own launcher, to compare with."""
    from torch.distributed.run import main

    main(sys.argv[1:])


__all__ = [
    "GONE_S",
    "Launched",
    "is_gone",
    "launch",
    "main_in_cgroup",
    "main_into_fifo",
    "run",
    "script",
    "torchrun",
    "wait_until_gone",
]
