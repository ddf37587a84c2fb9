"""All ranks of this host, one attempt after the other: start, signal, end."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from samestep.errors import PREEMPTED_STATUS
from samestep.launch import processes
from samestep.launch.memory import OutOfMemoryCounter
from samestep.launch.output import Output
from samestep.launch.rank import Place, Rank, start_rank

GRACE_S = 2.0  # from the first signal to SIGKILL, unless the launcher was asked to end
_KILLED_S = 1.0  # a process in uninterruptible sleep survives SIGKILL: do not wait for it for ever


class LocalRanks:
    """The ranks that run on this host now.

    Args:
        command: what `worker.py` is to run.
        folder: for the ranks' error files.
        output: shows what they print.
    """

    def __init__(self, command: Sequence[str], folder: Path, output: Output) -> None:
        self.running: list[Rank] = []
        self.stop_signal = int(signal.SIGTERM)
        self.grace_s = GRACE_S
        self.memory = OutOfMemoryCounter()  # counts from before the ranks of this attempt started
        self._command = command
        self.folder = folder
        self._output = output
        self._is_early = False
        self._asked_s = 0.0
        self._guard: processes.Guard | None = None

    def start_early(self, place: Place) -> None:
        """Start the first attempt's ranks; the next `start` finds them running."""
        self.start(place)
        self._is_early = True

    def start(self, place: Place) -> list[Rank]:
        """The ranks of `place`, running."""
        if self._is_early:
            self._is_early = False
            assert [rank.rank for rank in self.running] == list(place.ranks)
            return self.running
        self.running = []
        self.memory = OutOfMemoryCounter()
        self._asked_s = 0.0
        for local_rank in range(place.num_local_ranks):
            self.running.append(start_rank(place, local_rank, self._command, self.folder, self._output))
        self._guard = processes.Guard([rank.pid for rank in self.running])
        return self.running

    def are_preempted(self) -> bool:
        """Whether all have ended because they were asked to, and say so."""
        return bool(self.running) and all(rank.poll() == PREEMPTED_STATUS for rank in self.running)

    def send(self, signum: int) -> None:
        """Send all of them a signal."""
        for rank in self.running:
            if rank.poll() is None:
                rank.send(signum)

    def ask_to_end(self, *, but: Collection[Rank] = ()) -> None:
        """All of them, `but` those, have been sent `stop_signal`, once."""
        for rank in self.running:
            if rank not in but and rank.poll() is None and not rank.ended_by_launcher:
                rank.ended_by_launcher = True
                rank.send(self.stop_signal)
                self._asked_s = self._asked_s or time.monotonic()

    def end(self) -> None:
        """All of them have ended, and their children: asked to, then killed."""
        self.ask_to_end()
        if self._asked_s:
            _wait_for(self.running, self._asked_s + self.grace_s - time.monotonic())
        self.kill()

    def kill(self) -> None:
        """All of them have been killed, and their children."""
        running = [rank for rank in self.running if rank.poll() is None]
        for rank in running:
            rank.ended_by_launcher = True
            processes.end_session(rank.pid)
        _wait_for(running, _KILLED_S)
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None
        processes.end_orphans(keep=[rank.pid for rank in running if rank.poll() is None])


def _wait_for(ranks: Sequence[Rank], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while (left := [rank for rank in ranks if rank.poll() is None]) and time.monotonic() < deadline:
        ranks = left
        time.sleep(0.01)
