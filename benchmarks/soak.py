"""Mixed collectives over "shm", each result checked against Gloo's; and start/kill cycles that leave nothing.

    python benchmarks/soak.py                       # a million collectives over 2 and 4 ranks, 200 cycles
    python benchmarks/soak.py --collectives 2000 --cycles 5 --ranks 2

Sizes, dtypes, operations, roots, sub-groups and whether tensors lie in shared memory are drawn at random, the
same on all ranks. It ends with an error at the first result that differs, or the first thing that is left
behind.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.float16]
REDUCE_OPS = [dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]
NUMELS = [0, 1, 2, 15, 16, 17, 1000, 16_384, 16_385, 70_000, 200_000]
WEIGHTS = [1, 4, 4, 4, 4, 4, 8, 2, 2, 1, 1]
IN_FLIGHT = 6
SHOW_EVERY = 20_000
Groups = list[tuple[list[int], Any, Any]]  # (ranks, group over "shm", group over Gloo)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--collectives", type=int, default=1_000_000, help="over each number of ranks")
    parser.add_argument("--cycles", type=int, default=200, help="of starting ranks and killing one")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for num_ranks in options.ranks:
        soak(num_ranks, options.collectives, options.seed)
    kill_cycles(options.cycles, options.seed)


def soak(num_ranks: int, num_collectives: int, seed: int) -> None:
    """Run that many collectives, and check each."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(soak_rank, (num_ranks, f"{folder}/store", num_collectives, seed), num_ranks)
    seconds = time.perf_counter() - started
    print(f"{num_collectives} collectives over {num_ranks} ranks equal Gloo's ({seconds:.0f} s)", flush=True)


def soak_rank(rank: int, num_ranks: int, path: str, num_collectives: int, seed: int) -> None:
    join(rank, num_ranks, path)
    mixed(num_collectives, seed)
    dist.barrier()
    dist.destroy_process_group()


def mixed(num_collectives: int, seed: int) -> None:
    """What one rank of a soak does, in a world whose default group is Gloo's."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    subsets = [list(range(num_ranks))] * 3
    subsets += [[r for r in range(num_ranks) if mask >> r & 1] for mask in range(3, 1 << num_ranks)]
    groups: Groups = [
        (ranks, dist.new_group(ranks, backend="shm"), dist.new_group(ranks)) for ranks in subsets
    ]
    draw, own = random.Random(seed), random.Random(seed + rank)
    pending: list[Callable[[], None]] = []
    started_s = time.monotonic()
    for number in range(num_collectives):
        if rank == 0 and number and number % SHOW_EVERY == 0:
            took_s = time.monotonic() - started_s
            print(f"{number} of {num_collectives} over {num_ranks} ranks, {took_s:.0f} s", flush=True)
        ranks, shm, gloo = draw.choice(groups)
        kind = draw.choice(list(KINDS))
        step = random.Random(draw.random())
        if rank in ranks:
            check = KINDS[kind](step, ranks, ranks.index(rank), shm, gloo)
            pending.append(named(check, f"number {number}: {kind} over ranks {ranks}"))
        # Several stay in flight; they are waited for in any order.
        while len(pending) > own.randrange(IN_FLIGHT):
            pending.pop(own.randrange(len(pending)))()
    for check in pending:
        check()


def named(check: Callable[[], None], what: str) -> Callable[[], None]:
    def run() -> None:
        try:
            check()
        except Exception as error:
            raise RuntimeError(f"{what} of rank {dist.get_rank()}: {error}") from error

    return run


def join(rank: int, num_ranks: int, path: str) -> None:
    from samestep.shm import register

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    register()
    store = dist.FileStore(path, num_ranks)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def drawn(draw: random.Random, me: int, *, parts: int = 1) -> torch.Tensor:
    """Small whole numbers, so that Gloo's order of summation gives the same; different on each rank."""
    numel = draw.choices(NUMELS, WEIGHTS)[0] * parts
    dtype = draw.choice(DTYPES)
    generator = torch.Generator().manual_seed(draw.getrandbits(32) + me)
    return torch.randint(0, 3, (numel,), generator=generator).to(dtype)


def agree(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        if not torch.equal(one, other):
            where = int((one != other).view(-1).nonzero()[0])
            raise RuntimeError(
                f"differs from Gloo's at {where}: {one.view(-1)[where]}, {other.view(-1)[where]}"
            )


def all_reduce(draw: random.Random, ranks: list[int], me: int, shm: Any, gloo: Any) -> Callable[[], None]:
    tensor, op = drawn(draw, me), draw.choice(REDUCE_OPS)
    ours, theirs = tensor.clone(), tensor.clone()
    if draw.random() < 0.3:
        ours = shm.empty_shared(tensor.numel(), tensor.dtype).copy_(tensor)
    elif draw.random() < 0.2:
        ours = torch.stack([tensor, tensor], 1)[:, 0]  # strided
    work = dist.all_reduce(ours, op, shm, async_op=True)
    dist.all_reduce(theirs, op, gloo)
    return lambda: (work.wait(), agree([ours], [theirs]))[0]


def reduce(draw: random.Random, ranks: list[int], me: int, shm: Any, gloo: Any) -> Callable[[], None]:
    ours, op, root = drawn(draw, me), draw.choice(REDUCE_OPS), draw.choice(ranks)
    theirs = ours.clone()
    work = dist.reduce(ours, root, op, shm, async_op=True)
    dist.reduce(theirs, root, op, gloo)
    return lambda: (work.wait(), agree([ours], [theirs]) if ranks[me] == root else None)[0]


def broadcast(draw: random.Random, ranks: list[int], me: int, shm: Any, gloo: Any) -> Callable[[], None]:
    ours, root = drawn(draw, me), draw.choice(ranks)
    theirs = ours.clone()
    work = dist.broadcast(ours, root, shm, async_op=True)
    dist.broadcast(theirs, root, gloo)
    return lambda: (work.wait(), agree([ours], [theirs]))[0]


def all_gather(draw: random.Random, ranks: list[int], me: int, shm: Any, gloo: Any) -> Callable[[], None]:
    mine = drawn(draw, me)
    ours, theirs = ([torch.empty_like(mine) for _ in ranks] for _ in range(2))
    work = dist.all_gather(ours, mine, shm, async_op=True)
    dist.all_gather(theirs, mine, gloo)
    return lambda: (work.wait(), agree(ours, theirs))[0]


def gather(draw: random.Random, ranks: list[int], me: int, shm: Any, gloo: Any) -> Callable[[], None]:
    mine, root = drawn(draw, me), draw.choice(ranks)
    ours, theirs = ([torch.empty_like(mine) for _ in ranks] if ranks[me] == root else [] for _ in range(2))
    work = dist.gather(mine, ours or None, root, shm, async_op=True)
    dist.gather(mine, theirs or None, root, gloo)
    return lambda: (work.wait(), agree(ours, theirs))[0]


def scatter(draw: random.Random, ranks: list[int], me: int, shm: Any, gloo: Any) -> Callable[[], None]:
    parts, root = drawn(draw, me, parts=len(ranks)).chunk(len(ranks)), draw.choice(ranks)
    if len(parts) < len(ranks):  # nothing cannot be cut
        parts = [parts[0]] * len(ranks)
    ours, theirs = (torch.empty_like(parts[0]) for _ in range(2))
    inputs = list(parts) if ranks[me] == root else None
    work = dist.scatter(ours, inputs, root, shm, async_op=True)
    dist.scatter(theirs, inputs, root, gloo)
    return lambda: (work.wait(), agree([ours], [theirs]))[0]


def reduce_scatter(draw: random.Random, ranks: list[int], me: int, shm: Any, gloo: Any) -> Callable[[], None]:
    tensor = drawn(draw, me, parts=len(ranks))
    ours, theirs = (tensor.new_empty(tensor.numel() // len(ranks)) for _ in range(2))
    work = dist.reduce_scatter_single(ours, tensor, group=shm, async_op=True)
    dist.reduce_scatter_single(theirs, tensor, group=gloo)
    return lambda: (work.wait(), agree([ours], [theirs]))[0]


def all_to_all(draw: random.Random, ranks: list[int], me: int, shm: Any, gloo: Any) -> Callable[[], None]:
    rows = [[draw.randrange(50) for _ in ranks] for _ in ranks]  # rows[i][j]: from i to j
    width = draw.choice([1, 3, 700])
    ins, outs = rows[me], [row[me] for row in rows]
    tensor = torch.arange(sum(ins) * width).view(-1, width) * (me + 1)
    ours, theirs = (torch.empty(sum(outs), width, dtype=torch.int64) for _ in range(2))
    work = dist.all_to_all_single(ours, tensor, outs, ins, shm, async_op=True)
    dist.all_to_all_single(theirs, tensor, outs, ins, gloo)
    return lambda: (work.wait(), agree([ours], [theirs]))[0]


def ring(draw: random.Random, ranks: list[int], me: int, shm: Any, gloo: Any) -> Callable[[], None]:
    mine = drawn(draw, 0)
    got = torch.empty_like(mine)
    after, before = ranks[(me + 1) % len(ranks)], ranks[me - 1]
    works = [dist.isend(mine + me % 2, after, shm), dist.irecv(got, before, shm)]
    expected = mine + (me - 1) % len(ranks) % 2
    return lambda: ([work.wait() for work in works], agree([got], [expected]))[1]


def barrier(draw: random.Random, ranks: list[int], me: int, shm: Any, gloo: Any) -> Callable[[], None]:
    dist.barrier(shm)
    return lambda: None


KINDS = {
    kind.__name__: kind
    for kind in (
        *(all_reduce, reduce, broadcast, all_gather, gather, scatter),
        *(reduce_scatter, all_to_all, ring, barrier),
    )
}


def kill_cycles(num_cycles: int, seed: int) -> None:
    """Start two ranks, kill one or both in mid-collective; nothing is left, the survivor knows who died."""
    draw = random.Random(seed)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "samestep.shm.group"])
    before = left_behind()
    for cycle in range(num_cycles):
        with tempfile.TemporaryDirectory() as folder:
            reader, writer = context.Pipe(duplex=False)
            ranks = [context.Process(target=doomed, args=(r, f"{folder}/store", writer)) for r in (0, 1)]
            for process in ranks:
                process.start()
            for _ in ranks:
                if not reader.poll(60):
                    raise SystemExit(f"cycle {cycle}: the ranks did not start")
                reader.recv()
            time.sleep(draw.random() * 0.02)
            both = draw.random() < 0.3
            for process in ranks[: 1 + both]:
                os.kill(process.pid, signal.SIGKILL)
            if not both:
                if not reader.poll(10):
                    raise SystemExit(f"cycle {cycle}: the survivor does not know of the death")
                message = reader.recv()
                if f"rank 0 (process {ranks[0].pid}) has died" not in message:
                    raise SystemExit(f"cycle {cycle}: the survivor says: {message}")
            for process in ranks:
                process.join()
        left = left_behind() - before
        if left:
            raise SystemExit(f"cycle {cycle} left behind: {sorted(left)}")
    print(f"{num_cycles} start/kill cycles left nothing behind", flush=True)


def doomed(rank: int, path: str, writer: Any) -> None:
    join(rank, 2, path)
    group = dist.new_group(backend="shm")
    tensor = group.empty_shared(200_000, torch.float32).fill_(1)
    dist.barrier(group)
    writer.send("ready")
    try:
        while True:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
            dist.all_reduce(torch.ones(100), group=group)
    except RuntimeError as error:
        writer.send(str(error))
        os._exit(0)


def left_behind() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


if __name__ == "__main__":
    main()
