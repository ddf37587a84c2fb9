"""Run a function on every rank in a test: as threads (milliseconds) or as processes (about 0.1 s).

    def check(group):
        tensor = torch.ones(1)
        all_reduce(tensor, group).wait()
        return tensor.item()

    assert thread_ranks(check, 3) == [3.0, 3.0, 3.0]

Threads suffice for whatever takes its `process_group` as an argument. Processes are for death, signals,
hangs, and what torch keeps once per process (the default group, random streams).
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, Store

__all__ = ["PRELOAD", "RankError", "make_thread_group", "process_ranks", "rank_context", "thread_ranks"]

R = TypeVar("R")
_GROUP_TIMEOUT = timedelta(seconds=60)
# Imported once, by the server that forks rank processes; a program may start that server with more.
PRELOAD = ["torch", "torch.distributed", "samestep.testing", "samestep.gradients", "pytest", "hypothesis"]


class RankError(AssertionError):
    """A rank process raised, died or stayed silent; the message holds each one's traceback."""


def make_thread_group(
    store: Store, rank: int, world_size: int, timeout: timedelta = _GROUP_TIMEOUT
) -> dist.ProcessGroup:
    """A Gloo process group of which this thread is one rank; torch's default group is not touched.

    Ranks: all of them at the same time, each in its own thread, over one `HashStore`.
    """
    group = dist.ProcessGroup(store, rank, world_size)
    gloo = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(gloo)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    options._threads = 2
    backend = dist.ProcessGroupGloo(store, rank, world_size, options)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), gloo, backend)
    return group


def thread_ranks(
    fn: Callable[..., R], world_size: int = 2, *args: Any, timeout: timedelta = _GROUP_TIMEOUT
) -> list[R]:
    """What `fn(group, *args)` returned on each of `world_size` threads, in rank order.

    Raises:
        Exception: the first one that a rank raised. Ranks that wait for it end with the group's `timeout`.
    """
    store = HashStore()
    start = threading.Barrier(world_size)

    def main(rank: int) -> R:
        group = make_thread_group(store, rank, world_size, timeout)
        start.wait()
        return fn(group, *args)

    with ThreadPoolExecutor(world_size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(main, rank) for rank in range(world_size)]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [future.result() for future in futures]


def process_ranks(fn: Callable[..., R], world_size: int = 2, *args: Any, timeout: float = 90.0) -> list[R]:
    """What `fn(*args)` returned in each of `world_size` processes, in rank order.

    `fn` must be a module-level function. It runs with the launcher's variables set (RANK, WORLD_SIZE, ...)
    and with torch's default process group over Gloo made and destroyed around it, one thread per rank.

    Args:
        fn: called as `fn(*args)` on each rank.
        world_size: number of processes.
        args: anything that pickles.
        timeout: seconds after which silent ranks are killed.

    Raises:
        RankError: a rank raised, died, or said nothing within `timeout`.
    """
    context = rank_context()
    with tempfile.TemporaryDirectory() as folder:
        processes: list[Any] = []
        readers: list[Any] = []
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_process_main,
                args=(fn, rank, world_size, f"{folder}/store", writer, args),
                name=f"rank-{rank}",
            )
            process.start()
            writer.close()
            processes.append(process)
            readers.append(reader)
        try:
            return _collect(processes, readers, timeout)
        finally:
            for process in processes:
                process.join(0.5)
                if process.is_alive():
                    process.kill()
                    process.join()
            for reader in readers:
                reader.close()


def _collect(processes: list[Any], readers: list[Any], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: list[Any] = [None] * len(readers)
    failures: list[tuple[int, str]] = []
    pending = dict(zip(readers, range(len(readers)), strict=True))
    while pending:
        ready: list[Any] = multiprocessing.connection.wait(
            list(pending), max(0.0, deadline - time.monotonic())
        )
        if not ready:
            failures += [(rank, f"said nothing within {timeout} s") for rank in pending.values()]
            break
        for reader in ready:
            rank = pending.pop(reader)
            try:
                succeeded, results[rank] = pickle.loads(reader.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                succeeded, results[rank] = False, f"died, exit code {processes[rank].exitcode}"
            if not succeeded:
                failures.append((rank, results[rank]))
                # The others may be waiting for this one: give them a moment, not the whole time-out.
                deadline = min(deadline, time.monotonic() + 5.0)
    if failures:
        raise RankError("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in failures))
    return results


def rank_context() -> ForkServerContext:
    """The multiprocessing context of rank processes: they fork from a server that has torch loaded."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _process_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    path: str,
    writer: Any,
    args: tuple[Any, ...],
) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    )
    try:
        store = FileStore(path, world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_GROUP_TIMEOUT)
        dist.barrier()  # a rank that left now would fail those that are still connecting to it
        result = fn(*args)
        if dist.is_initialized():
            dist.destroy_process_group()
        # Plain pickle: multiprocessing's would send tensors as handles, which die with this process.
        writer.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        writer.send_bytes(pickle.dumps((False, traceback.format_exc())))
        os._exit(1)
