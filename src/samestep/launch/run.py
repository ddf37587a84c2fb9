"""`samestep run`, once its options are known: start the ranks, watch them, report, exit.

On one host the ranks start at once, while the launcher is still importing torch: their port is open before
anybody answers on it. torchelastic's agent then takes them over.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from pathlib import Path
from typing import NoReturn

from samestep.errors import PREEMPTED_STATUS
from samestep.launch import processes
from samestep.launch.failure import Failure, report
from samestep.launch.loopback import LOOPBACK, listen
from samestep.launch.options import RunOptions
from samestep.launch.output import Output
from samestep.launch.rank import Place, threads_per_rank
from samestep.launch.ranks import LocalRanks
from samestep.launch.stop import SignalWatch, Stopped

_DRAIN_S = 1.0


def run(options: RunOptions) -> int:
    """The exit status of the run that `options` describe: 0, or how the rank that failed first ended.

    That is its own exit code, 1 for an exception, 128 + the number of the signal that killed it. A signal
    to the launcher, such as Ctrl-C, gives 128 + its number too; but 75 if all ranks of this host then ended
    with that, having saved.

    Raises:
        LaunchError: the options turn out to be impossible here.
    """
    processes.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder, Output(options.log_dir) as output:
        local_ranks = LocalRanks(options.command, Path(folder), output)
        try:
            with SignalWatch(local_ranks, options.grace_s) as signals:
                try:
                    return _run(options, local_ranks, output, signals)
                except Stopped as stop:
                    return _stop(stop.signum, local_ranks, output)
        finally:
            local_ranks.kill()


def _stop(signum: int, local_ranks: LocalRanks, output: Output) -> int:
    local_ranks.end()
    output.drain(_DRAIN_S)
    if local_ranks.are_preempted():
        _say_preempted(output)
        return PREEMPTED_STATUS
    return 128 + (signal.SIGPIPE if output.is_broken else signum)


def _say_preempted(output: Output) -> None:
    output.say(f"samestep: the ranks ended as asked, with status {PREEMPTED_STATUS}: start the run again")


def _run(options: RunOptions, local_ranks: LocalRanks, output: Output, signals: SignalWatch) -> int:
    run_id = options.run_id
    if options.num_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = threads_per_rank(options.num_ranks)
        output.say(f"samestep: {options.num_ranks} ranks on this host, {threads} thread(s) each")
    if not options.is_one_host:
        output.say(f"samestep: waiting for {options.min_hosts} host(s) at {options.rdzv_endpoint}")
        return _supervise(options, run_id, None, local_ranks, output, signals)
    with listen() as listener:
        local_ranks.start_early(_only_place(options, run_id, listener.getsockname()[1]))
        return _supervise(options, run_id, listener, local_ranks, output, signals)


def _supervise(
    options: RunOptions,
    run_id: str,
    listener: socket.socket | None,
    local_ranks: LocalRanks,
    output: Output,
    signals: SignalWatch,
) -> int:
    def leave(signum: int) -> NoReturn:
        status = _stop(signum, local_ranks, output)
        shutil.rmtree(local_ranks.folder, ignore_errors=True)
        os._exit(status)

    with signals.importing(leave):
        from samestep.launch.agent import Agent, RendezvousError, quiet_torchelastic
        from samestep.launch.rendezvous import OneHost, many_hosts

    def tell(failures: list[Failure], world_size: int, restart: int) -> None:
        here = {rank.rank for rank in local_ranks.running}
        for failure in failures:
            if failure.rank in here and failure.traceback:
                output.log(failure.rank, failure.traceback)
        what_next = f"restart {restart} of {options.max_restarts}" if restart else ""
        output.say(report(failures, world_size=world_size, what_next=what_next))

    quiet_torchelastic()
    rendezvous = OneHost(run_id, listener) if listener is not None else many_hosts(options, run_id)
    agent = Agent(options, rendezvous, local_ranks, output, check=signals.check, on_failure=tell)
    try:
        result = agent.run()
    except RendezvousError as error:
        output.drain(_DRAIN_S)
        output.say(f"samestep: the rendezvous at {options.rdzv_endpoint} failed: {error}")
        return 1
    output.drain(_DRAIN_S)
    agent.leave()
    if agent.is_preempted:
        _say_preempted(output)
        return PREEMPTED_STATUS
    if agent.failures:
        return agent.failures[0].exit_status
    return 1 if result.is_failed() else 0


def _only_place(options: RunOptions, run_id: str, port: int) -> Place:
    return Place(
        first_rank=0,
        num_local_ranks=options.num_ranks,
        world_size=options.num_ranks,
        host_index=0,
        num_hosts=1,
        master_addr=LOOPBACK,
        master_port=port,
        run_id=run_id,
        restart_count=0,
        max_restarts=options.max_restarts,
    )
