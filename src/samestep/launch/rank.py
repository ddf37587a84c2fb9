"""One rank's process: its environment, start and end. No torch here: ranks start before it is imported."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.environment import num_usable_cores
from samestep.launch import processes
from samestep.launch.output import Output
from samestep.observe.messages import LISTENING_VARIABLE

# For glibc: a step frees and takes the same hundreds of megabytes, activations and gradients. By default
# they go back to the system in between, and each page is zeroed by the kernel when it is next touched.
_KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),  # the most that mallopt(3) allows
    "MALLOC_TRIM_THRESHOLD_": str(1024**3),
}


@dataclass(frozen=True)
class Place:
    """Where one attempt's ranks on this host stand in the world; torchelastic's agent decides it."""

    first_rank: int
    num_local_ranks: int
    world_size: int
    host_index: int
    num_hosts: int
    master_addr: str
    master_port: int
    run_id: str
    restart_count: int
    max_restarts: int

    @property
    def ranks(self) -> range:
        """This host's ranks."""
        return range(self.first_rank, self.first_rank + self.num_local_ranks)


@dataclass(frozen=True)
class LastWord:
    """What `worker.py` wrote about the exception that ended its script."""

    exit_code: int
    time_s: float  # time.time() at which it was caught
    exception: str  # its type's name
    last_line: str
    traceback: str


@dataclass(eq=False)
class Rank:
    """A rank's process and what is known of its end."""

    rank: int
    process: subprocess.Popen[bytes]
    error_file: Path
    ended_s: float | None = None  # time.time() of its end, where the system tells at once
    noticed_s: float = 0.0  # time.time() when it was first seen to have ended
    ended_by_launcher: bool = False

    @property
    def pid(self) -> int:
        """Its process id, which is its session's and process group's too."""
        return self.process.pid

    def poll(self) -> int | None:
        """Its exit code (minus the signal that killed it), None while it runs; its children end with it."""
        if self.process.returncode is None and processes.has_exited(self.pid):
            processes.end_session(self.pid)
        exit_code = self.process.poll()
        if exit_code is not None and not self.noticed_s:
            self.noticed_s = time.time()
        return exit_code

    def last_word(self) -> LastWord | None:
        """What it wrote about the exception that ended it; None if it wrote nothing (yet)."""
        try:
            data = json.loads(self.error_file.read_text("utf-8"))
            message, ours = data["message"], data["samestep"]
            return LastWord(
                exit_code=int(ours["exit_code"]),
                time_s=float(ours["time_s"]),
                exception=str(ours["exception"]),
                last_line=str(message["message"]),
                traceback=str(message["extraInfo"]["py_callstack"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def send(self, signum: int) -> None:
        """Send it a signal; nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signum)


def threads_per_rank(num_local_ranks: int) -> int:
    """Intra-op threads for each of a host's ranks: its cores shared out, one at least."""
    return max(1, num_usable_cores() // num_local_ranks)


def rank_variables(place: Place, local_rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables that a rank sees beyond the inherited ones; torchrun's, and a few of ours.

    Those that only tune (threads, the allocator, network interface) give way to inherited ones.
    """
    rank = place.first_rank + local_rank
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.num_local_ranks),
        "GROUP_RANK": str(place.host_index),
        "GROUP_WORLD_SIZE": str(place.num_hosts),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(place.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONUNBUFFERED": "1",
        LISTENING_VARIABLE: "1",
    }
    defaults = {
        "OMP_NUM_THREADS": str(threads_per_rank(place.num_local_ranks)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **_KEEP_FREED_MEMORY,
    }
    if place.num_hosts == 1:
        defaults["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    return variables | {name: value for name, value in defaults.items() if name not in inherited}


def start_rank(place: Place, local_rank: int, command: Sequence[str], folder: Path, output: Output) -> Rank:
    """A rank, started; its lines go to `output`, its error file into `folder`."""
    rank = place.first_rank + local_rank
    error_file = folder / f"restart_{place.restart_count}_rank_{rank}.json"
    error_file.unlink(missing_ok=True)
    variables = rank_variables(place, local_rank, os.environ) | {"TORCHELASTIC_ERROR_FILE": str(error_file)}
    stdout_read, stdout_write = os.pipe()
    stderr_read, stderr_write = os.pipe()
    # Until `worker.py` is ready to be quiet about it, an interrupt of the rank has to wait.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "samestep.launch.worker", str(os.getpid()), *command],
            env={**os.environ, **variables},
            stdout=stdout_write,
            stderr=stderr_write,
            start_new_session=True,
        )
    except BaseException:
        os.close(stdout_read)
        os.close(stderr_read)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        os.close(stdout_write)
        os.close(stderr_write)
    started = Rank(rank, process, error_file)
    output.follow(started, stdout_read, stderr_read)
    return started
