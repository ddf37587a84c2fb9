"""The processes that a rank leaves behind: find them, end them.

A rank is the leader of its own session. Its children (loader workers, helpers) stay in that session unless
they start another; those are found because the launcher, as a *child subreaper* (Linux), becomes the parent
of every descendant whose own parent has gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_HAS_PROC = sys.platform == "linux"


def adopt_orphans() -> None:
    """Orphaned descendants become children of this process (Linux; elsewhere nothing happens)."""
    if _HAS_PROC:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Guard:
    """Kills the process groups of `leaders` if this process dies, however it dies.

    It is a shell that waits for the end of a pipe which only this process holds open.
    """

    def __init__(self, leaders: Collection[int]) -> None:
        self._shell = subprocess.Popen(
            [
                "/bin/sh",
                "-c",
                'read _; kill -s KILL -- "$@"',
                "samestep-guard",
                *(f"-{pid}" for pid in leaders),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """It is not needed any more."""
        self._shell.kill()
        self._shell.wait()
        assert self._shell.stdin is not None
        self._shell.stdin.close()


def has_exited(pid: int) -> bool:
    """Whether child `pid` has exited; it is not reaped, so its number stays its own."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def end_session(leader: int) -> None:
    """Every process of the session that `leader` leads is killed.

    Call it before `leader` is reaped: until then nobody else can get its number.
    """
    _kill_group(leader)
    for pid, _, session in _process_table():
        if session == leader and pid != leader:
            _kill(pid)


def end_orphans(keep: Collection[int], *, patience_s: float = 1.0) -> None:
    """Every child of this process that is not in `keep` is killed and reaped, and theirs in turn."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        orphans = [pid for pid, parent, _ in _process_table() if parent == os.getpid() and pid not in keep]
        if not orphans:
            return
        for pid in orphans:
            _kill(pid)
        for pid in orphans:
            _reap(pid, deadline)


def reap_orphans(keep: Collection[int]) -> None:
    """Orphans that have ended by themselves do not stay behind as zombies."""
    if not _HAS_PROC:
        return
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in keep:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def _process_table() -> Iterator[tuple[int, int, int]]:
    """(process, parent, session) of each process that this one may see."""
    if not _HAS_PROC:
        return
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The command's name is in parentheses and may itself hold blanks and parentheses.
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                yield int(folder.name), int(fields[1]), int(fields[3])


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _reap(pid: int, deadline: float) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.005)
