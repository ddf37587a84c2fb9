"""The backend "shm" with threads as ranks: every dtype, layout, operation and order."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from samestep.errors import CollectiveError
from samestep.shm.group import ShmProcessGroup
from samestep.shm.signal import Signals
from samestep.tree import tree_sum

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
EVERY_DTYPE = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.float8_e4m3fn]


def shm_ranks(fn, size, *args, timeout_s=20.0):
    """What `fn(group, *args)` returned on each of `size` threads."""
    store = dist.HashStore()

    def main(rank):
        group = ShmProcessGroup(store, rank, size, timedelta(seconds=timeout_s))
        try:
            return fn(group, *args)
        finally:
            store.add("done", 1)
            while store.add("done", 0) < size and not group._signals.alarmed():
                threading.Event().wait(0.002)
            group.shutdown()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(main, range(size)))


def all_reduce(group, tensor, op=dist.ReduceOp.SUM, wait=True):
    options = dist.AllreduceOptions()
    options.reduceOp = op
    work = group.allreduce([tensor], options)
    if wait:
        work.wait()
    return work


def drawn(numel, dtype, seed):
    """Values whose sum depends on the order of summation."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(numel, dtype=dtype, generator=generator)
    return (torch.randn(numel, generator=generator) * 10).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_sums_follow_the_tree_to_the_bit_on_every_path(size):
    numels = [1, 33, 5000, 140_000, 300_001]

    def check(group):
        sums = []
        for numel in numels:
            for shared in (False, True):
                mine = drawn(numel, torch.float32, group.rank())
                if shared:
                    mine = group.empty_shared(numel, torch.float32).copy_(mine)
                all_reduce(group, mine)
                sums.append(mine.clone())
        return sums

    results = shm_ranks(check, size)
    expected = [
        tree_sum([drawn(numel, torch.float32, rank) for rank in range(size)], torch.add) for numel in numels
    ]
    for sums in results:
        for (index, _), ours in zip(itertools.product(range(len(numels)), (0, 1)), sums, strict=True):
            assert torch.equal(ours, expected[index])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reduce_scatter_follows_the_tree_too(size):
    numel = 70_001

    def check(group):
        out = torch.empty(numel)
        inputs = [drawn(numel, torch.float32, 10 * group.rank() + r) for r in range(size)]
        group.reduce_scatter([out], [inputs]).wait()
        return out

    for rank, out in enumerate(shm_ranks(check, size)):
        parts = [drawn(numel, torch.float32, 10 * r + rank) for r in range(size)]
        assert torch.equal(out, tree_sum(parts, torch.add))


OPERATORS = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operation_on_every_dtype_it_is_defined_for(name):
    bitwise = name in ("BAND", "BOR", "BXOR")
    dtypes = [*INTEGERS, torch.bool] if bitwise else [*FLOATS, *INTEGERS, torch.bool]
    if name in ("SUM", "PRODUCT"):
        dtypes = dtypes + COMPLEX

    def check(group):
        results = []
        for dtype in dtypes:
            tensor = drawn(70, dtype, group.rank())
            all_reduce(group, tensor, getattr(dist.ReduceOp, name))
            results.append(tensor)
        return results

    for results in shm_ranks(check, 3):
        for dtype, ours in zip(dtypes, results, strict=True):
            expected = tree_sum([drawn(70, dtype, rank) for rank in range(3)], OPERATORS[name])
            assert torch.equal(ours, expected), dtype


def test_average_and_premultiplied_sum():
    def check(group):
        floats = torch.tensor([1.0, 4.0]) * (group.rank() + 1)
        integers = torch.tensor([1, 5]) * (group.rank() + 1)
        scaled = torch.tensor([1.0, 4.0])
        all_reduce(group, floats, dist.ReduceOp.AVG)
        all_reduce(group, integers, dist.ReduceOp.AVG)
        all_reduce(group, scaled, dist._make_nccl_premul_sum(0.5))
        return floats.tolist(), integers.tolist(), scaled.tolist()

    assert shm_ranks(check, 2) == [([1.5, 6.0], [1, 7], [1.0, 4.0])] * 2


@pytest.mark.parametrize("name", ["MIN", "BAND"])
def test_what_torch_cannot_compute_is_refused_before_anything_is_sent(name):
    dtype = torch.complex64 if name == "MIN" else torch.float32

    def check(group):
        with pytest.raises(CollectiveError, match=f"torch cannot compute {name} of {dtype}"):
            all_reduce(group, torch.ones(2, dtype=dtype), getattr(dist.ReduceOp, name))
        tensor = torch.ones(2)
        all_reduce(group, tensor)  # the group is as good as before
        return tensor.tolist()

    assert shm_ranks(check, 2) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_every_dtype_moves(dtype):
    numel = 7

    def check(group):
        rank, size = group.rank(), group.size()
        mine = drawn(numel, torch.float32, rank).to(dtype)
        gathered = [torch.zeros(numel).to(dtype) for _ in range(size)]
        group.allgather([gathered], [mine]).wait()
        swapped = torch.zeros(size).to(dtype)
        group.all_to_all_single(swapped, mine[:size].contiguous(), [], []).wait()
        root = mine.clone()
        options = dist.BroadcastOptions()
        options.rootRank = 1
        group.broadcast([root], options).wait()
        received = torch.zeros(numel).to(dtype)
        works = [group.send([mine], (rank + 1) % size, 5), group.recv([received], (rank - 1) % size, 5)]
        for work in works:
            work.wait()
        as_bytes = [t.view(-1).view(torch.uint8) for t in (torch.cat(gathered), swapped, root, received)]
        return [t.tolist() for t in as_bytes]

    size = 3
    inputs = [drawn(numel, torch.float32, rank).to(dtype) for rank in range(size)]

    def raw(tensor):
        return tensor.contiguous().view(-1).view(torch.uint8).tolist()

    for rank, (gathered, swapped, root, received) in enumerate(shm_ranks(check, size)):
        assert gathered == raw(torch.cat(inputs))
        assert swapped == raw(torch.cat([tensor[rank : rank + 1] for tensor in inputs]))
        assert root == raw(inputs[1])
        assert received == raw(inputs[rank - 1])


def test_strided_conjugated_and_negated_tensors():
    def check(group):
        rank = group.rank()
        strided = torch.zeros(6, 8)
        strided[::2, ::2] = rank + 1.0
        all_reduce(group, strided[::2, ::2])
        conjugated = torch.full((3,), 1 + 2j * (rank + 1)).conj()
        all_reduce(group, conjugated)
        negated = torch.full((3,), 1 + 1j * (rank + 1)).conj().imag
        all_reduce(group, negated)
        outs = torch.zeros(4, 2).t()
        options = AllgatherOptions()
        group.all_gather_single(outs, torch.full((4,), float(rank)), options).wait()
        return strided.sum().item(), conjugated.resolve_conj().tolist(), negated.tolist(), outs.tolist()

    expected = (36.0, [2 - 6j] * 3, [-3.0] * 3, [[0.0] * 4, [1.0] * 4])
    assert shm_ranks(check, 2) == [expected, expected]


def test_parameters_and_scalars_and_empty_tensors():
    def check(group):
        parameter = torch.nn.Parameter(torch.ones(3))
        all_reduce(group, parameter)
        scalar = torch.tensor(float(group.rank()))
        all_reduce(group, scalar)
        empty = torch.empty(0, 5)
        all_reduce(group, empty)
        group.broadcast([empty]).wait()
        return parameter.tolist(), scalar.item(), parameter.requires_grad

    assert shm_ranks(check, 3) == [([3.0] * 3, 3.0, True)] * 3


def test_sparse_tensors_are_refused_with_what_to_do():
    def check(group):
        with pytest.raises(CollectiveError, match=r"call \.to_dense\(\)"):
            all_reduce(group, torch.eye(3).to_sparse())

    shm_ranks(check, 1)


def test_arguments_that_do_not_fit_are_refused():
    def check(group):
        with pytest.raises(CollectiveError, match="a list of 2 tensors"):
            group.allgather([[torch.ones(1)]], [torch.ones(1)])
        with pytest.raises(CollectiveError, match="are not 2 times 2"):
            group.all_gather_single(torch.ones(3), torch.ones(2))
        with pytest.raises(CollectiveError, match="3 rows cannot be split evenly among 2"):
            group.all_to_all_single(torch.ones(3), torch.ones(3), [], [])
        with pytest.raises(
            CollectiveError, match=r"split sizes \[1, 1\] must be 2 numbers that add up to the 3"
        ):
            group.all_to_all_single(torch.ones(3), torch.ones(3), [1, 1], [1, 2])
        group.barrier().wait()

    shm_ranks(check, 2)


def test_coalesced_collectives_are_one_work():
    def check(group):
        rank = group.rank()
        tensors = [torch.full((n,), float(rank)) for n in (3, 50_000)]
        group.allreduce_coalesced(tensors).wait()
        outs = [torch.empty(2 * n) for n in (3, 4)]
        group.all_gather_single_coalesced(outs, [torch.full((n,), float(rank)) for n in (3, 4)]).wait()
        lists = [[torch.empty(2), torch.empty(3)] for _ in range(2)]
        group.allgather_coalesced(lists, [torch.full((n,), float(rank)) for n in (2, 3)]).wait()
        parts = [torch.empty(n) for n in (3, 4)]
        group.reduce_scatter_single_coalesced(parts, [torch.ones(2 * n) for n in (3, 4)]).wait()
        group._start_coalescing(torch.device("cpu"))
        group.allreduce([tensors[0]])
        group.allreduce([tensors[1]])
        group._end_coalescing(torch.device("cpu")).wait()
        return (
            [tensor.unique().tolist() for tensor in tensors],
            [out.tolist() for out in outs],
            [[t.tolist() for t in row] for row in lists],
            [part.tolist() for part in parts],
        )

    expected = (
        [[2.0], [2.0]],
        [[0.0] * 3 + [1.0] * 3, [0.0] * 4 + [1.0] * 4],
        [[[0.0] * 2, [0.0] * 3], [[1.0] * 2, [1.0] * 3]],
        [[2.0] * 3, [2.0] * 4],
    )
    assert shm_ranks(check, 2) == [expected, expected]


def test_a_future_is_completed_although_nobody_waits():
    def check(group):
        tensor = torch.full((100_000,), 1.0)
        if group.rank() == 1:
            threading.Event().wait(0.1)
        work = all_reduce(group, tensor, wait=False)
        doubled = work.get_future().then(lambda future: future.value()[0][0].item() * 2)
        return doubled.wait()

    assert shm_ranks(check, 2) == [4.0, 4.0]


def test_a_callback_may_wait_for_another_collective():
    """As torch's PowerSGD does, in a thread that is not the one that waits."""

    def check(group):
        first, second = torch.ones(100_000), torch.ones(200_000)

        def again(_):
            return all_reduce(group, second, wait=False).get_future().wait()[0].sum().item()

        if group.rank():
            threading.Event().wait(0.05)
        return all_reduce(group, first, wait=False).get_future().then(again).wait()

    assert shm_ranks(check, 2) == [400_000.0] * 2


def test_progress_is_made_while_nobody_waits():
    """Rank 1 waits for what rank 0 has only issued, and rank 0 for a sign that rank 1 gives afterwards."""
    sign = threading.Event()

    def check(group):
        tensor = torch.full((1_000_000,), 1.0)
        work = all_reduce(group, tensor, wait=False)
        if group.rank() == 0:
            assert sign.wait(10)
        else:
            work.wait()
            sign.set()
        work.wait()
        return tensor.unique().tolist()

    assert shm_ranks(check, 2) == [[2.0], [2.0]]


def test_two_threads_of_a_rank_use_one_group():
    def check(group):
        got = torch.zeros(4)
        receiver = threading.Thread(target=lambda: group.recv([got], 1 - group.rank(), 3).wait())
        receiver.start()
        tensor = torch.full((5,), float(group.rank()))
        for _ in range(5):
            all_reduce(group, tensor)
        group.send([torch.full((4,), 7.0)], 1 - group.rank(), 3).wait()
        receiver.join(10)
        return tensor.tolist(), got.tolist()

    assert shm_ranks(check, 2) == [([16.0] * 5, [7.0] * 4)] * 2


def test_split_group_numbers_ranks_in_the_order_given():
    def check(group):
        part = group.split_group([2, 0], group_name="evens")
        if group.rank() == 1:
            assert part is None
            return None
        tensor = torch.tensor([float(group.rank())])
        all_reduce(part, tensor)
        rank = part.rank()
        group_name = part.group_name
        part.shutdown()
        return rank, group_name, tensor.item()

    assert shm_ranks(check, 3) == [(1, "evens", 2.0), None, (0, "evens", 2.0)]


def test_memory_of_shared_tensors_is_used_again():
    def check(group):
        first = group.empty_shared(1000, torch.float32)
        address = first.data_ptr()
        view = first[10:20]
        del first
        other = group.empty_shared(1000, torch.float32)
        assert other.data_ptr() != address  # a view is still there
        del view
        assert group.empty_shared(1000, torch.float32).data_ptr() == address
        return other.dtype, other.shape

    assert shm_ranks(check, 1) == [(torch.float32, torch.Size([1000]))]


def test_the_memory_barrier_for_other_processors_works_here_too():
    def check(group):
        signals = Signals(group._region, total_store_order=False)
        group._exchange._signals = signals
        group._engine._signals = signals
        group._lanes._signals = signals
        for _ in range(20):
            tensor = torch.full((40_000,), 1.0)
            all_reduce(group, tensor)
            assert tensor.unique().tolist() == [2.0]
        return True

    assert shm_ranks(check, 2) == [True, True]
