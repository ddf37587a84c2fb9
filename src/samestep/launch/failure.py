"""Which rank failed first, and the report that says so."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from samestep.errors import PREEMPTED_STATUS
from samestep.launch.memory import OutOfMemoryCounter

if TYPE_CHECKING:
    from samestep.launch.rank import LastWord, Rank

# A rank that loses its connection fails because another one has gone: it is never the cause if there is
# another failure. What Gloo, NCCL, UCC, MPI, the store, "shm", the reducer and join() say:
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset)( by( remote)? peer)?|broken pipe|connection refused|"
    r"socket (closed|timeout)|remote (peer|process) (exited|has)|ncclRemoteError|peer (closed|reset)|"
    r"failed to recv|recvValue failed|heartbeat|"
    r"\(process \d+\) (has (died|destroyed the group)|could not join|ended before)|"
    r"cannot map the shared memory of|group can no longer be used|"
    r"gave up in the middle of this backward|raised inside of join\(\)",
    re.IGNORECASE,
)
_MAX_LINE = 200

# Death by a signal or os._exit is noticed only when the process is gone; its peers may notice earlier.
_UNANNOUNCED_ADVANTAGE_S = 0.25


@dataclass(frozen=True)
class Failure:
    """How one rank ended, other than in success."""

    rank: int
    host: str
    pid: int
    exit_code: int  # minus the signal that killed it
    time_s: float
    exception: str = ""  # its type's name; "" if the script left no exception behind
    last_line: str = ""
    traceback: str = ""
    lost_a_peer: bool = False  # it failed only because another rank was gone
    ended_by_launcher: bool = False
    killed_for_memory: str = ""  # the evidence; "" if there is none

    @property
    def exit_status(self) -> int:
        """What the launcher exits with when this is the first failure: as a shell would say it."""
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code

    @property
    def how(self) -> str:
        """`exit code 1`, `SIGSEGV`, ..."""
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        if self.killed_for_memory:
            return f"killed by the kernel, probably out of memory ({self.killed_for_memory})"
        return f"killed by {signal_name(-self.exit_code)}, which the launcher did not send"

    def to_json(self) -> str:
        """For the launchers of other hosts."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """The failure that another host's launcher has told of."""
        return cls(**json.loads(text))


def signal_name(signum: int) -> str:
    """`SIGKILL` for 9; the number itself if it has no name here."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def failures_of(ranks: Sequence[Rank], memory: OutOfMemoryCounter) -> list[Failure]:
    """The failures among ranks that have all ended, the first one first."""
    return in_order([_failure_of(rank, memory) for rank in ranks if rank.poll() != 0])


def in_order(failures: Sequence[Failure]) -> list[Failure]:
    """The cause first: the earliest failure that nothing else explains."""

    def key(failure: Failure) -> tuple[bool, bool, bool, float]:
        is_unannounced = failure.exception == ""
        time_s = failure.time_s - (_UNANNOUNCED_ADVANTAGE_S if is_unannounced else 0.0)
        is_preempted = failure.exit_code == PREEMPTED_STATUS
        return (failure.ended_by_launcher, is_preempted, failure.lost_a_peer, time_s)

    return sorted(failures, key=key)


def lost_a_peer(word: LastWord | None) -> bool:
    """Whether a rank that left `word` failed only because another rank was gone."""
    return word is not None and word.exception != "SystemExit" and bool(_LOST_PEER.search(word.last_line))


def is_preempted(word: LastWord | None) -> bool:
    """Whether a rank that left `word` was asked to end, and has saved."""
    return word is not None and word.exit_code == PREEMPTED_STATUS


def _failure_of(rank: Rank, memory: OutOfMemoryCounter) -> Failure:
    exit_code = rank.poll()
    if exit_code is None:  # it survived SIGKILL: stuck in the kernel
        exit_code = -signal.SIGKILL
    word = rank.last_word()
    time_s = rank.ended_s or rank.noticed_s
    ours = rank.ended_by_launcher and word is None
    if word is not None:
        if rank.ended_by_launcher:  # it had failed, and was slow to leave
            exit_code = word.exit_code
        time_s = word.time_s
    return Failure(
        rank=rank.rank,
        host=socket.gethostname(),
        pid=rank.pid,
        exit_code=exit_code,
        time_s=time_s,
        exception=word.exception if word else "",
        last_line=word.last_line if word else "",
        traceback=word.traceback if word else "",
        lost_a_peer=lost_a_peer(word),
        ended_by_launcher=ours,
        killed_for_memory=memory.evidence() if exit_code == -signal.SIGKILL and not ours else "",
    )


def report(failures: Sequence[Failure], *, world_size: int, what_next: str = "") -> str:
    """What the launcher prints about `failures`, which are in order: the first one's traceback first."""
    first, *others = failures
    place = f"host {first.host}, pid {first.pid}"
    lines = [f"rank {first.rank} of {world_size} failed: {first.how} ({place})"]
    if first.exception:
        lines += first.traceback.rstrip("\n").splitlines()
    for failure in sorted(others, key=lambda f: f.rank):
        lines.append(f"rank {failure.rank}: {_afterwards(failure, first)}")
    if what_next:
        lines.append(what_next)
    return "\n".join(lines)


def _afterwards(failure: Failure, first: Failure) -> str:
    if failure.ended_by_launcher:
        return "ended by the launcher"
    why = f", rank {first.rank} being gone" if failure.lost_a_peer else ""
    what = _shortened(failure.last_line) or failure.how
    return f"failed later{why}: {what}"


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_LINE else f"{text[: _MAX_LINE - 3]}..."
