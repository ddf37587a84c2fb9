"""torchelastic's agent on one host: it decides who is who, watches the ranks and restarts them.

The agent's loop (rendezvous, start, poll, restart, stop) and the poll of the processes are torchelastic's.
Ours are the four steps that it leaves to a subclass, and how ranks start (`ranks.py`) and end.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler

from samestep.errors import PREEMPTED_STATUS
from samestep.launch import processes
from samestep.launch.failure import Failure, failures_of, in_order, is_preempted, lost_a_peer
from samestep.launch.hosts import Hosts
from samestep.launch.options import RunOptions
from samestep.launch.output import Output
from samestep.launch.rank import Place
from samestep.launch.ranks import LocalRanks

__all__ = ["Agent", "RendezvousError", "quiet_torchelastic"]

MONITOR_INTERVAL_S = 0.05  # on one host: nothing but `waitid`
MANY_HOSTS_MONITOR_INTERVAL_S = 0.2  # each time a question to the store
CULPRIT_PATIENCE_S = 2.2  # how long a rank that lost a peer may wait for the one it lost to fail
LEAVE_PATIENCE_S = 1.0  # how long a rank that has left its last word may take to go


def quiet_torchelastic() -> None:
    """What torchelastic would log, warnings and errors too, is not printed: the report says it."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())


class _NoRedirection(LogsSpecs):
    """The ranks' output and error files are `ranks.py`'s: torchelastic redirects nothing."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        nothing = dict.fromkeys(envs, "")
        return LogsDest(nothing, nothing, {}, {}, nothing)

    @property
    def root_log_dir(self) -> str:
        return ""


class Ranks(SubprocessContext):
    """torchelastic's supervision of one attempt's ranks, which run already."""

    def __init__(self, local_ranks: LocalRanks, grace_s: float) -> None:
        self._grace_s = grace_s
        local = range(len(local_ranks.running))
        super().__init__(
            name="samestep",
            entrypoint=sys.executable,
            args=dict.fromkeys(local, ()),
            envs={i: {} for i in local},
            logs_specs=_NoRedirection(),
        )
        self.ranks = local_ranks.running
        self._local_ranks = local_ranks

    def start(self) -> None:
        """torchelastic's would also take the launcher's signal handlers away."""
        self._start()

    def _start(self) -> None:
        # What the base class wants of a handler is `.proc`, and of that `.pid` and `.poll()`.
        handlers: Any = {i: SimpleNamespace(proc=rank) for i, rank in enumerate(self.ranks)}
        self.subprocess_handlers = handlers

    def _poll(self) -> Any:
        processes.reap_orphans(keep=[rank.pid for rank in self.ranks])
        self._hurry_those_that_leave()
        return None if self._is_cause_to_come() or self._are_others_to_follow() else super()._poll()

    def _are_others_to_follow(self) -> bool:
        """Whether some ranks have been preempted and the others may still be on their way."""
        ended = [rank for rank in self.ranks if rank.poll() is not None]
        if len(ended) == len(self.ranks) or not ended:
            return False
        waited_s = time.time() - min(rank.noticed_s for rank in ended)
        return waited_s < self._grace_s and all(rank.poll() == PREEMPTED_STATUS for rank in ended)

    def _hurry_those_that_leave(self) -> None:
        """A rank that has left its last word runs its exit functions, which may block: not for ever."""
        leaving = [rank for rank in self.ranks if rank.error_file.exists() and rank.poll() is None]
        for rank in leaving:
            word = rank.last_word()
            patience_s = self._grace_s if is_preempted(word) else LEAVE_PATIENCE_S
            if word is not None and time.time() - word.time_s > patience_s:
                rank.ended_by_launcher = True
                rank.send(signal.SIGKILL)
        words = [rank.last_word() for rank in leaving]
        if any(not lost_a_peer(word) and not is_preempted(word) for word in words):
            self._local_ranks.ask_to_end(but=leaving)

    def _is_cause_to_come(self) -> bool:
        """Whether the ranks that failed have only lost a peer: the one they lost may still be on its way."""
        failed = [rank for rank in self.ranks if rank.poll()]
        if not failed or not any(rank.poll() is None for rank in self.ranks):
            return False
        waited_s = time.time() - min(rank.noticed_s for rank in failed)
        return waited_s < CULPRIT_PATIENCE_S and all(lost_a_peer(rank.last_word()) for rank in failed)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        self._local_ranks.end()

    def pids(self) -> dict[int, int]:
        """Process ids by local rank."""
        return {i: rank.pid for i, rank in enumerate(self.ranks)}


class Agent(SimpleElasticAgent):
    """One host's agent.

    Args:
        options: what was asked for.
        rendezvous: gives hosts their place.
        local_ranks: starts and ends the ranks of this host.
        output: shows what they print.
        check: called at each turn of the agent's loop; raises to end it.
        on_failure: called with the failures of an attempt, in order, the world size and the number of the
            restart that follows (0: none), before anything is restarted.
    """

    def __init__(
        self,
        options: RunOptions,
        rendezvous: RendezvousHandler,
        local_ranks: LocalRanks,
        output: Output,
        *,
        check: Callable[[], None],
        on_failure: Callable[[list[Failure], int, int], None],
    ) -> None:
        super().__init__(
            WorkerSpec(
                role="default",
                local_world_size=options.num_ranks,
                rdzv_handler=rendezvous,
                entrypoint=sys.executable,
                max_restarts=options.max_restarts,
                monitor_interval=(
                    MONITOR_INTERVAL_S if options.is_one_host else MANY_HOSTS_MONITOR_INTERVAL_S
                ),
            )
        )
        self.failures: list[Failure] = []
        self._local_ranks = local_ranks
        self._output = output
        self._check = check
        self._on_failure = on_failure
        self._hosts: Hosts | None = None
        self._context: Ranks | None = None
        self._grace_s = options.grace_s
        self.is_preempted = False  # the ranks were asked to end, have saved, and want to be started again

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers = worker_group.workers
        place = Place(
            first_rank=workers[0].global_rank,
            num_local_ranks=len(workers),
            world_size=workers[0].world_size,
            host_index=worker_group.group_rank or 0,
            num_hosts=worker_group.group_world_size or 1,
            master_addr=worker_group.master_addr or "",
            master_port=worker_group.master_port or 0,
            run_id=worker_group.spec.rdzv_handler.get_run_id(),
            restart_count=self._restart_count,
            max_restarts=worker_group.spec.max_restarts,
        )
        self._local_ranks.start(place)
        self.failures = []
        store: Any = worker_group.store
        self._hosts = Hosts(store, place.host_index, place.num_hosts)
        self._context = Ranks(self._local_ranks, self._grace_s)
        self._context.start()
        return self._context.pids()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._check()
        assert self._context is not None
        assert self._hosts is not None
        result = self._context.wait(0)
        workers = worker_group.workers
        if result is None:
            if not self._hosts.have_failed():
                return RunResult(state=WorkerState.HEALTHY)
            self._context.close()
        elif not result.is_failed() or self._local_ranks.are_preempted():
            # Starting them again is for whoever preempted them, with the machine they get then.
            self.is_preempted = result.is_failed()
            return RunResult(
                state=WorkerState.SUCCEEDED,
                return_values={workers[i].global_rank: value for i, value in result.return_values.items()},
            )
        failed = {} if result is None else {workers[i].global_rank: f for i, f in result.failures.items()}
        self._tell(worker_group)
        return RunResult(state=WorkerState.FAILED, failures=failed)

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any) -> None:
        self._local_ranks.end()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        self._local_ranks.end()

    def _exit_barrier(self) -> None:
        """Wait until the other hosts' ranks have ended too."""
        assert self._hosts is not None
        self._hosts.finish()
        if self._hosts.have_failed():
            self._tell(self._worker_group)

    def leave(self) -> None:
        """Close the rendezvous; if its store is this launcher's, after the others."""
        rendezvous = self._worker_group.spec.rdzv_handler
        rendezvous.shutdown()
        if self._hosts is not None:
            self._hosts.leave(holds_store=getattr(rendezvous, "holds_store", False))

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        # Events go nowhere; the base class asks the name service for this host's name for each of them.
        return Event(state, source)

    def _record_worker_events(self, result: RunResult) -> None:
        """Nothing: see `_construct_event`."""

    @property
    def _restart_count(self) -> int:
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    def _tell(self, worker_group: WorkerGroup) -> None:
        """Have this attempt's failures reported, those of other hosts too."""
        assert self._context is not None
        assert self._hosts is not None
        self._output.drain(1.0)
        own = failures_of(self._context.ranks, self._local_ranks.memory)
        is_last = self._remaining_restarts == 0
        self.failures = in_order([*own, *self._hosts.exchange(own, is_last=is_last)])
        if self.failures:
            world_size = worker_group.workers[0].world_size
            self._on_failure(self.failures, world_size, 0 if is_last else self._restart_count + 1)
