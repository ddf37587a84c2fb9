from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from samestep import collectives
from samestep.testing import process_ranks, thread_ranks


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_exchange_json_gives_every_rank_all_values_in_rank_order(world_size: int) -> None:
    def exchange(group: dist.ProcessGroup) -> list[object]:
        value = {"rank": group.rank(), "text": "é" * group.rank()}
        return collectives.exchange_json(value, group)

    expected = [{"rank": r, "text": "é" * r} for r in range(world_size)]
    assert thread_ranks(exchange, world_size) == [expected] * world_size


def test_gather_bytes_of_uneven_and_empty_lengths() -> None:
    def gather(group: dist.ProcessGroup) -> list[bytes]:
        return collectives.gather_bytes(b"ab" * group.rank(), group)

    assert thread_ranks(gather, 3) == [[b"", b"ab", b"abab"]] * 3
    assert thread_ranks(lambda group: collectives.gather_bytes(b"", group), 2) == [[b"", b""]] * 2


def test_all_reduce_and_broadcast() -> None:
    def run(group: dist.ProcessGroup) -> tuple[float, float]:
        total = torch.tensor([float(group.rank() + 1)])
        collectives.all_reduce(total, group).wait()
        word = torch.tensor([float(group.rank())])
        collectives.broadcast(word, group, src=2).wait()
        collectives.barrier(group)
        return total.item(), word.item()

    assert thread_ranks(run, 3) == [(6.0, 2.0)] * 3


def _sum_over_processes() -> float:
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return total.item()


def test_process_ranks() -> None:
    assert process_ranks(_sum_over_processes, 2) == [3.0, 3.0]
