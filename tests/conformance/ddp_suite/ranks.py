"""One test of the suite on W ranks, forked from a process that has imported everything already.

A fork takes some milliseconds where an interpreter with torch takes two seconds, and no test inherits what
another one left behind.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import multiprocessing.connection
import os
import re
import sys
import tempfile
import threading
import time
import traceback
import unittest
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.conformance.ddp_suite.shim import exchange

# What a rank reports because another one is gone; the other one's report is the one to show.
_CONSEQUENCE = re.compile(
    r"[Cc]onnection (closed|reset)|[Tt]imed out|barrier timeout|Broken pipe|its own error says why"
)
_GRACE_S = 3.0

Report = tuple[str, str, str]  # status, its detail, a traceback


@dataclass(frozen=True)
class Outcome:
    """What became of one test on all its ranks."""

    status: str  # "pass", "fail", "hang", or "skip" where the test itself says that it cannot run
    detail: str = ""  # first line of the error, or why it was skipped
    log: str = ""  # traceback, then each rank's output; where it hangs, what each rank was doing
    duration_s: float = 0.0


def run_test(suite: Any, name: str, world_size: int, classes: tuple[Any, Any], timeout_s: float) -> Outcome:
    """Run the suite's test `name` on `world_size` new processes.

    Args:
        classes: those that the test finds as DistributedDataParallel and SyncBatchNorm.
        timeout_s: seconds after which silent ranks are killed.
    """
    start_s = time.monotonic()
    context = mp.get_context("fork")
    barrier = context.Barrier(world_size)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "barrier").mkdir()
        processes: list[Any] = []
        readers: list[Any] = []
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            setting = (suite, name, rank, world_size, classes, folder)
            process = context.Process(target=_rank_main, args=(setting, barrier, timeout_s, writer))
            process.start()
            writer.close()
            processes.append(process)
            readers.append(reader)
        try:
            reports = _collect(processes, readers, start_s + timeout_s)
        finally:
            for process, reader in zip(processes, readers, strict=True):
                process.join(0.2)
                if process.is_alive():
                    process.kill()
                    process.join()
                reader.close()
        logs = [path.read_text(errors="replace") for path in sorted(Path(folder).glob("rank-*.log"))]
    return _judge(reports, logs, time.monotonic() - start_s)


def _collect(processes: list[Any], readers: list[Any], deadline_s: float) -> list[Report | None]:
    """What each rank reported, None of those that said nothing in time."""
    reports: list[Report | None] = [None] * len(readers)
    pending = {reader: rank for rank, reader in enumerate(readers)}
    while pending:
        ready: list[Any] = mp.connection.wait(list(pending), max(0.0, deadline_s - time.monotonic()))
        if not ready:
            break
        for reader in ready:
            rank = pending.pop(reader)
            try:
                report = reader.recv()
            except EOFError:
                processes[rank].join(5)
                report = ("fail", f"the process died, exit code {processes[rank].exitcode}", "")
            reports[rank] = report
            if report[0] == "fail":
                # The others may be waiting for this rank; they get a moment to say so.
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
    return reports


def _judge(reports: list[Report | None], logs: list[str], duration_s: float) -> Outcome:
    output = "\n".join(f"--- output of rank {rank} ---\n{log}" for rank, log in enumerate(logs))
    failures = [report for report in reports if report and report[0] == "fail"]
    if failures:
        _, detail, trace = next((r for r in failures if not _CONSEQUENCE.search(r[1])), failures[0])
        return Outcome("fail", detail, f"{trace}\n{output}", duration_s)
    if None in reports:
        return Outcome("hang", "said nothing in time", output, duration_s)
    skips = [report for report in reports if report and report[0] == "skip"]
    if skips:
        return Outcome("skip", skips[0][1], output, duration_s)
    return Outcome("pass", "", output, duration_s)


def _rank_main(setting: tuple[Any, ...], barrier: Any, timeout_s: float, writer: Any) -> None:
    folder, rank = setting[-1], setting[2]
    with Path(f"{folder}/rank-{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        faulthandler.enable(log)
        faulthandler.dump_traceback_later(timeout_s - 1.0, file=log)
        report = ("pass", "", "")
        try:
            _run(*setting, barrier)
        except threading.BrokenBarrierError:
            pass  # this rank is through; another one failed and says why
        except unittest.SkipTest as skip:
            report = ("skip", str(skip), "")
        except SystemExit as end:
            report = ("skip", _reason_of(end.code), "")
        except BaseException as error:
            barrier.abort()
            text = str(error).strip() or "no message"
            report = ("fail", f"{type(error).__name__}: {text.splitlines()[0]}", traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        writer.send(report)
    os._exit(0)  # not through destructors: groups may still wait for ranks that are gone


def _run(
    suite: Any,
    name: str,
    rank: int,
    world_size: int,
    classes: tuple[Any, Any],
    folder: str,
    barrier: Any,
) -> None:
    from torch.testing._internal.common_utils import TestCase, set_rng_seed

    class Case(suite.DistributedTest._DistTestBase, TestCase):
        pass

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), TEMP_DIR=folder)
    exchange(suite, *classes)
    suite.Barrier.barrier_id = 0
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/init",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=suite.CUSTOM_PG_TIMEOUT.get(name, suite.default_pg_timeout)),
    )
    case: Any = Case(name)
    case.rank = rank
    case.world_size = str(world_size)  # a string, as in the suite's own classes
    set_rng_seed()
    barrier.wait()
    getattr(case, name)()
    barrier.wait()  # no rank leaves while another one still needs it
    dist.destroy_process_group()


def _reason_of(exit_code: Any) -> str:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return next((skip.message for skip in TEST_SKIPS.values() if skip.exit_code == exit_code), str(exit_code))
