"""A process that ends while Gloo's threads still hold tensors would be killed: wait until they let go.

A thread of Gloo's gives a collective's tensors back a moment after whoever waited for it went on. When such
a thread is the last owner it needs the interpreter's lock, and a thread that asks for this lock once the
interpreter has begun to end is unwound through C++ code that allows no unwinding: "terminate called without
an active exception", SIGABRT, though all the work was done. Destroying the group joins its threads, but only
when nothing refers to the group any more, and much does: a script's global variables, a wrapper, and the
default arguments of torch's own functions (`torch.distributed.nn`, which `torch._dynamo` imports when an
optimizer is first made, keeps the group that exists at that moment for ever).
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

__all__ = ["wait_for_gloo"]

_TASKS = Path("/proc/self/task")
_THREAD_NAME = "pt_gloo_runloop"  # given by torch to the threads that run Gloo's collectives
_PATIENCE_S = 2.0
_LOOK_AGAIN_S = 0.002


def wait_for_gloo() -> None:
    """No thread of Gloo's is on its way to give a finished collective's tensors back.

    Runs by itself when the process ends, before Python is taken apart.

    A thread that needs the interpreter's lock gets it while this one sleeps; those that sleep as well, with
    the lock free, have nothing left to do or wait for another rank. Where threads cannot be looked at (not
    Linux) it waits for a fixed moment.
    """
    if not _TASKS.is_dir():
        time.sleep(10 * _LOOK_AGAIN_S)
        return
    deadline = time.monotonic() + _PATIENCE_S
    busy = True
    while busy and time.monotonic() < deadline:
        threads = _threads_of_gloo()
        if threads:
            time.sleep(_LOOK_AGAIN_S)
        busy = any(_is_running(task) for task in threads)


def _threads_of_gloo() -> list[Path]:
    return [task for task in _TASKS.iterdir() if _read(task / "comm").strip() == _THREAD_NAME]


def _is_running(task: Path) -> bool:
    # "pid (name) state ...", and a name may itself hold brackets.
    state = _read(task / "stat").rpartition(")")[2].split()[:1]
    return state in (["R"], ["D"])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended
        return ""


atexit.register(wait_for_gloo)
