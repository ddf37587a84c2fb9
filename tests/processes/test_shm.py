"""The backend "shm" between real processes, against Gloo in the same processes."""

from __future__ import annotations

import os
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from samestep.shm import register
from samestep.testing import process_ranks

# Those that Gloo knows for every collective; tests/ranks/test_shm.py has them all.
DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8]
# Nothing, one element, less than a cache line, one stage and a bit, several stages.
NUMELS = [0, 1, 7, 1000, 131_073, 300_001]


def shm_group(timeout_s=20.0):
    register()
    return dist.new_group(backend="shm", timeout=timedelta(seconds=timeout_s))


def values(numel, dtype, seed):
    """Small whole numbers: every order of summation gives the same, so Gloo's results can be compared."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 5, (numel,), generator=generator).to(dtype)


def equal(ours, theirs):
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), (ours, theirs)
    else:
        for one, other in zip(ours, theirs, strict=True):
            equal(one, other)


def both(call):
    """What `call(group)` returns over "shm" and over Gloo is equal."""
    equal(call(both.group), call(None))


def moving():
    both.group = shm_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for numel in NUMELS if dtype == torch.float32 else [5, 131_073]:
            mine = values(numel, dtype, rank)

            def broadcast(group, mine=mine):
                tensor = mine.clone()
                dist.broadcast(tensor, size - 1, group)
                return tensor

            def all_gather(group, mine=mine):
                outs = [torch.empty_like(mine) for _ in range(size)]
                dist.all_gather(outs, mine, group)
                return outs

            def all_gather_single(group, mine=mine, dtype=dtype, numel=numel):
                out = torch.empty(size * numel, dtype=dtype)
                dist.all_gather_single(out, mine, group)
                return out

            def gather(group, mine=mine):
                outs = [torch.empty_like(mine) for _ in range(size)] if rank == 0 else None
                dist.gather(mine, outs, 0, group)
                return outs or []

            def scatter(group, mine=mine, dtype=dtype, numel=numel):
                out = torch.empty_like(mine)
                ins = [values(numel, dtype, 10 + r) for r in range(size)] if rank == size - 1 else None
                dist.scatter(out, ins, size - 1, group)
                return out

            for call in (broadcast, all_gather, all_gather_single, gather, scatter):
                both(call)
    dist.barrier(both.group)


@pytest.mark.parametrize("size", [2, 3])
def test_what_moves_data_equals_gloo(size):
    process_ranks(moving, size)


def reducing():
    both.group = shm_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    ops = ["SUM", "PRODUCT", "MIN", "MAX"]
    bits = ["BAND", "BOR", "BXOR"]
    for dtype, names in [
        (torch.float32, ops),
        (torch.float64, ops),
        (torch.int64, ops + bits),
        (torch.uint8, ops + bits),
    ]:
        for name in names:
            op = getattr(dist.ReduceOp, name)
            for numel in NUMELS if dtype == torch.float32 and name == "SUM" else [5, 131_073]:
                mine = values(numel, dtype, rank)

                def all_reduce(group, mine=mine, op=op):
                    tensor = mine.clone()
                    dist.all_reduce(tensor, op, group)
                    return tensor

                def reduce(group, mine=mine, op=op):
                    tensor = mine.clone()
                    dist.reduce(tensor, size - 1, op, group)
                    return tensor if rank == size - 1 else []

                def reduce_scatter(group, op=op, numel=numel, dtype=dtype):
                    out = torch.empty(numel, dtype=dtype)
                    ins = [values(numel, dtype, 10 * rank + r) for r in range(size)]
                    dist.reduce_scatter(out, ins, op, group)
                    return out

                def reduce_scatter_tensor(group, op=op, numel=numel, dtype=dtype):
                    out = torch.empty(numel, dtype=dtype)
                    dist.reduce_scatter_single(out, values(size * numel, dtype, rank), op, group)
                    return out

                for call in (all_reduce, reduce, reduce_scatter, reduce_scatter_tensor):
                    both(call)


@pytest.mark.parametrize("size", [2, 3])
def test_what_reduces_equals_gloo(size):
    process_ranks(reducing, size)


def exchanging():
    both.group = shm_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for base in (0, 1, 50, 70_000):
        # Rank i has base + i + 2 * j rows of 3 for rank j.
        ins = [base + rank + 2 * j for j in range(size)]
        outs = [base + i + 2 * rank for i in range(size)]
        tensor = values(3 * sum(ins), torch.float32, rank).view(-1, 3)

        def all_to_all_single(group, tensor=tensor, ins=ins, outs=outs):
            out = torch.empty(sum(outs), 3)
            dist.all_to_all_single(out, tensor, outs, ins, group)
            return out

        both(all_to_all_single)
        parts = list(tensor.split(ins))
        received = [torch.empty(rows, 3) for rows in outs]
        dist.all_to_all(received, parts, both.group)
        equal(torch.cat(received), all_to_all_single(None))
    even = torch.arange(2 * size) + 100 * rank
    both(lambda group: [dist.all_to_all_single(out := torch.empty_like(even), even, group=group), out][1])
    # Uneven all-gather: Gloo lacks it.
    lengths = [0, 200_000, 3][:size]
    got = [torch.empty(length) for length in lengths]
    dist.all_gather(got, torch.full((lengths[rank],), float(rank)), both.group)
    equal(got, [torch.full((length,), float(r)) for r, length in enumerate(lengths)])


@pytest.mark.parametrize("size", [2, 3])
def test_all_to_all_with_splits_and_uneven_all_gather(size):
    process_ranks(exchanging, size)


def conversing():
    group = shm_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for numel in (0, 1, 17, 1_000_000):
        got = torch.empty(numel)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((numel,), float(rank)), after, group),
                dist.P2POp(dist.irecv, got, before, group),
            ]
        )
        for work in works:
            work.wait()
        assert torch.equal(got, torch.full((numel,), float(before)))
    # Tags may be received in another order than they were sent in.
    if rank == 0:
        for tag in (1, 2, 3):
            dist.send(torch.full((200_000,), float(tag)), 1, group, tag)
    elif rank == 1:
        for tag in (3, 1, 2):
            got = torch.empty(200_000)
            dist.recv(got, 0, group, tag)
            assert torch.equal(got, torch.full((200_000,), float(tag)))
    # From anybody.
    if rank == 0:
        senders = set()
        for _ in range(size - 1):
            got = torch.empty(3)
            sender = dist.recv(got, group=group)
            assert torch.equal(got, torch.full((3,), float(sender)))
            senders.add(sender)
        assert senders == set(range(1, size))
    else:
        dist.send(torch.full((3,), float(rank)), 0, group)
    # Strided tensors on both sides.
    if rank == 0:
        dist.send(torch.arange(12).view(3, 4).t(), 1, group)
    elif rank == 1:
        got = torch.zeros(8, 6, dtype=torch.int64)
        dist.recv(got[::2, ::2], 0, group)
        assert torch.equal(got[::2, ::2], torch.arange(12).view(3, 4).t())
        assert got[1::2].sum() == 0


@pytest.mark.parametrize("size", [2, 3])
def test_send_and_receive(size):
    process_ranks(conversing, size)


def in_shared_memory(numels):
    group = shm_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel in numels:
        private = torch.arange(numel, dtype=torch.float32) * (rank + 1)
        shared = group.empty_shared(numel, torch.float32).copy_(private)
        mixed = group.empty_shared(numel, torch.float32).copy_(private) if rank else private.clone()
        for tensor in (private, shared, mixed):
            dist.all_reduce(tensor, group=group)
            assert torch.equal(tensor, torch.arange(numel, dtype=torch.float32) * (size * (size + 1) // 2))
    return os.getpid()


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_in_shared_memory_on_all_ranks_or_some(size):
    numels = [0, 1, 5, 16384, 16385, 300_001]
    assert len(set(process_ranks(in_shared_memory, size, numels))) == size


def overlapping(seed):
    """Many collectives in flight, private and shared, waited for in another order than issued."""
    group = shm_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    order = random.Random(seed)
    flights = []
    for index in range(60):
        numel = order.choice([1, 100, 20_000, 200_000])
        shared = order.random() < 0.5
        tensor = group.empty_shared(numel, torch.float32) if shared else torch.empty(numel)
        tensor.fill_(rank + index)
        flights.append((index, tensor, dist.all_reduce(tensor, group=group, async_op=True)))
    order.shuffle(flights)
    for index, tensor, work in flights:
        work.wait()
        assert work.is_completed()
        assert torch.equal(tensor, torch.full_like(tensor, size * index + sum(range(size)))), index


@pytest.mark.parametrize("size", [2, 4])
def test_many_collectives_in_flight(size):
    process_ranks(overlapping, size, 7)
