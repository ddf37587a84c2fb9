"""The backend "shm" when ranks die, are late, leave, disagree, or have no memory: real processes."""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from samestep.errors import CollectiveError, WorldError
from samestep.shm import register
from samestep.shm.group import ShmProcessGroup
from samestep.shm.region import Segment
from samestep.testing import RankError, process_ranks


def shm_group(timeout_s=20.0):
    register()
    return dist.new_group(backend="shm", timeout=timedelta(seconds=timeout_s))


def pids():
    """Of all ranks, through Gloo."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, os.getpid())
    return gathered


def killed_in_all_reduce():
    group = shm_group()
    rank, processes = dist.get_rank(), pids()
    dist.barrier(group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        dist.all_reduce(torch.ones(100_000), group=group)
    assert time.monotonic() - started < 2.0  # the 1 s, and a loaded machine's scheduling
    message = str(caught.value)
    assert f"rank 1 (process {processes[1]}) has died" in message
    assert "all_reduce(SUM) of float32[100000]" in message
    assert "number 2" in message
    with pytest.raises(CollectiveError, match="has died"):
        dist.barrier(group)


@pytest.mark.parametrize("size", [2, 3])
def test_a_killed_rank_is_named_within_a_second(size):
    with pytest.raises(RankError) as caught:
        process_ranks(killed_in_all_reduce, size)
    message = str(caught.value)
    assert "--- rank 1 ---\ndied, exit code -9" in message
    assert message.count("---\n") == 1, message  # what the survivors saw was right


def killed_before_its_memory_is_mapped():
    group = shm_group()
    rank, processes = dist.get_rank(), pids()
    tensor = group.empty_shared(200_000, torch.float32).fill_(1)
    death = select.poll()
    death.register(os.pidfd_open(processes[1]), select.POLLIN)
    dist.barrier(group)
    if rank == 1:
        dist.all_reduce(tensor, group=group, async_op=True)  # says where its tensor lies
        os.kill(os.getpid(), signal.SIGKILL)
    assert death.poll(60_000)
    started = time.monotonic()
    with pytest.raises(CollectiveError, match=rf"rank 1 \(process {processes[1]}\) has died"):
        dist.all_reduce(tensor, group=group)
    assert time.monotonic() - started < 2.0


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_killed_before_its_memory_is_mapped_is_named(size):
    with pytest.raises(RankError) as caught:
        process_ranks(killed_before_its_memory_is_mapped, size)
    assert str(caught.value).count("---\n") == 1, str(caught.value)


def made_and_left_at_once():
    for number in range(20):
        store = dist.PrefixStore(str(number), dist.group.WORLD.get_group_store())
        group = ShmProcessGroup(store, dist.get_rank(), dist.get_world_size(), timedelta(seconds=20))
        group.shutdown()


def test_a_rank_that_leaves_at_once_leaves_nobody_looking_for_its_memory():
    process_ranks(made_and_left_at_once, 3)


def killed_while_it_maps():
    if dist.get_rank() == 1:
        Segment.attach = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorldError, match=r"rank 1 \(process \d+\)( has died|: .*ended|.* ended)|of rank 1 "):
        shm_group()
    assert time.monotonic() - started < 10


def test_a_rank_killed_while_the_group_is_made_is_named():
    with pytest.raises(RankError) as caught:
        process_ranks(killed_while_it_maps, 3)
    assert str(caught.value).count("---\n") == 1, caught.value


def no_files_left():
    group = shm_group()
    rank, processes = dist.get_rank(), pids()
    tensor = group.empty_shared(200_000, torch.float32).fill_(1)
    dist.barrier(group)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    with pytest.raises(CollectiveError) as caught:
        dist.all_reduce(tensor, group=group)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    message = str(caught.value)
    assert f"rank 0 (process {processes[0]}) cannot map a tensor of rank 1" in message
    assert "Too many open files" in message


def test_a_rank_that_may_open_no_more_files_says_so_to_all():
    process_ranks(no_files_left, 2)


def killed_in_recv():
    group = shm_group()
    rank, processes = dist.get_rank(), pids()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError, match=rf"recv from rank 1 .*process {processes[1]}\) has died"):
        dist.recv(torch.ones(3), 1, group)


def test_a_killed_sender_is_named():
    with pytest.raises(RankError) as caught:
        process_ranks(killed_in_recv, 2)
    assert str(caught.value).count("---\n") == 1, str(caught.value)


def disagree(case):
    group = shm_group()
    rank, processes = dist.get_rank(), pids()
    odd = rank == dist.get_world_size() - 1
    calls = {
        "kind": lambda: dist.barrier(group) if odd else dist.all_reduce(torch.ones(3), group=group),
        "shape": lambda: dist.all_reduce(torch.ones(4 if odd else 3), group=group),
        "large": lambda: dist.all_reduce(torch.ones(400_000 if odd else 3), group=group),
        "dtype": lambda: dist.all_reduce(torch.ones(3, dtype=torch.float64 if odd else None), group=group),
        "operation": lambda: dist.all_reduce(
            torch.ones(3), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, group=group
        ),
        "root": lambda: dist.broadcast(torch.ones(3), int(odd), group),
        "size": lambda: dist.gather(
            torch.ones(4 if odd else 3), [torch.ones(3)] * len(processes) if rank == 0 else None, 0, group
        ),
    }
    dist.barrier(group)
    started = time.monotonic()

    def call():
        calls[case]()
        dist.barrier(group)  # a rank that only sends learns of it in the next one

    with pytest.raises(CollectiveError) as caught:
        call()
    assert time.monotonic() - started < 5.0
    message = str(caught.value)
    assert f"rank 0 (process {processes[0]})" in message
    assert f"rank {len(processes) - 1} (process {processes[-1]})" in message
    return message.removeprefix("the group can no longer be used: ")


@pytest.mark.parametrize("case", ["kind", "shape", "large", "dtype", "operation", "root", "size"])
def test_ranks_that_disagree_all_learn_both_sides(case):
    messages = process_ranks(disagree, 3, case)
    assert len(set(messages)) == 1
    words = {
        "kind": ["all_reduce(SUM) of float32[3]", "barrier"],
        "shape": ["float32[3]", "float32[4]"],
        "large": ["float32[3]", "float32[400000]"],
        "dtype": ["float32[3]", "float64[3]"],
        "operation": ["all_reduce(SUM)", "all_reduce(MAX)"],
        "root": ["broadcast(src=0)", "broadcast(src=1)"],
        "size": ["16 bytes", "12 are expected"],
    }
    assert all(word in messages[0] for word in words[case])


def one_is_late():
    group = shm_group(timeout_s=0.5)
    rank, processes = dist.get_rank(), pids()
    dist.all_reduce(torch.ones(1), group=group)
    if rank == 0:
        with pytest.raises(CollectiveError) as caught:
            dist.all_reduce(torch.ones(5), group=group)
        message = str(caught.value)
        assert "timed out" in message
        assert f"rank 1 (process {processes[1]})" in message
        assert "number 1" in message  # what the late one did last
        assert "number 2" in message
    dist.barrier()  # over Gloo
    if rank == 1:
        with pytest.raises(CollectiveError, match=rf"rank 0 \(process {processes[0]}\).* timed out"):
            dist.all_reduce(torch.ones(5), group=group)


def test_a_late_rank_is_named_and_learns_of_it():
    process_ranks(one_is_late, 2)


def shorter_time():
    group = shm_group()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(5), group=group, async_op=True)
        assert not work.is_completed()
        with pytest.raises(CollectiveError, match="timed out"):
            work.wait(timedelta(seconds=0.2))
        assert isinstance(work.exception(), CollectiveError)
        assert not work.is_success()
    dist.barrier()


def test_wait_with_a_time_out_of_its_own():
    process_ranks(shorter_time, 2)


def aborted():
    group = shm_group()
    rank = dist.get_rank()
    dist.barrier(group)
    if rank == 0:
        threading.Timer(0.2, group.abort).start()
    started = time.monotonic()
    with pytest.raises(CollectiveError, match=r"rank 0 \(process \d+\) aborted the group"):
        dist.recv(torch.ones(1), (rank + 1) % 2, group)
    assert time.monotonic() - started < 5.0


def test_abort_from_another_thread_ends_the_waits_of_all_ranks():
    process_ranks(aborted, 2)


def left():
    group = shm_group()
    rank = dist.get_rank()
    dist.barrier(group)
    if rank == 1:
        dist.destroy_process_group(group)
    else:
        with pytest.raises(CollectiveError, match=r"rank 1 \(process \d+\) has destroyed the group"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()


def test_a_rank_that_destroyed_the_group_is_named():
    process_ranks(left, 2)


def shared_segments():
    """The lines of this process's memory map that are samestep's."""
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    return [line for line in lines if "samestep" in line]


def names_in(folder):
    return {path.name for path in Path(folder).iterdir()}


def made_and_destroyed():
    names = names_in("/dev/shm")
    descriptors = len(names_in("/proc/self/fd"))
    threads = threading.active_count()
    for _ in range(5):
        group = shm_group()
        tensor = group.empty_shared(100_000, torch.float32).fill_(1)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.get_future().wait()
        assert names_in("/dev/shm") == names
        dist.destroy_process_group(group)
        del group, tensor, work
    gc.collect()
    assert len(names_in("/proc/self/fd")) <= descriptors + 2  # torch's own stores
    assert threading.active_count() == threads
    return len(shared_segments())


def test_nothing_is_left_of_a_destroyed_group():
    assert process_ranks(made_and_destroyed, 2) == [0, 0]


def own_memory_mb():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def many_shapes():
    group = shm_group()
    tensor = torch.ones(400_000)
    for _ in range(2):
        dist.all_reduce(tensor, group=group)
        dist.reduce_scatter_single(torch.empty(100_000), tensor, group=group)
    before_mb = own_memory_mb()
    for numel in range(300_000, 300_064):
        dist.all_reduce(tensor[:numel], group=group)
    assert own_memory_mb() - before_mb < 16


def test_each_new_shape_takes_no_memory_of_its_own():
    process_ranks(many_shapes, 4)


def little_memory(limit_bytes):
    """A file size limit makes reserving shared memory fail as a full one would."""
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    group = shm_group()
    for numel in (3, 500_000):
        tensor = torch.ones(numel)
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.full((numel,), 2.0))
    outs = [torch.empty(70_000) for _ in range(2)]
    dist.all_gather(outs, torch.full((70_000,), float(dist.get_rank())), group)
    assert outs[1].sum() == 70_000
    if dist.get_rank() == 1:
        with pytest.raises(CollectiveError, match="could not reserve 4000000 bytes"):
            group.empty_shared(1_000_000, torch.float32)


def test_little_memory_makes_smaller_stages():
    process_ranks(little_memory, 2, 300_000)


def no_memory():
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with pytest.raises(WorldError, match=r"could not reserve .* MB of shared memory .*gloo"):
            shm_group(timeout_s=1.0)


def test_too_little_memory_is_said():
    process_ranks(no_memory, 2)
