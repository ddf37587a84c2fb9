"""`samestep.gather` and `World.gather` between processes, over Gloo and over "shm"."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import samestep
from samestep.errors import WorldError
from samestep.shm import register
from samestep.testing import process_ranks


def _gathered(backend):
    register()
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=20))
    data = torch.randn(101, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    sampler = samestep.DistributedSampler(data, mode="exact")
    batches = [{"rows": data[i : i + 1], "index": i} for i in sampler]
    whole = samestep.gather(batches, of=sampler, group=group)
    assert torch.equal(whole["rows"], data)
    assert whole["index"].tolist() == list(range(101))
    return samestep.gather((samestep.get_rank(), [0.5] * samestep.get_rank()), dst=1, group=group)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_every_rank_or_one_gets_all_rows(backend: str) -> None:
    first, second, third = process_ranks(_gathered, 3, backend)
    assert first is None
    assert third is None
    assert [column.tolist() for column in second] == [[0, 1, 2], [0.5, 0.5, 0.5]]


def _world_of_one():
    dist.destroy_process_group()
    with pytest.raises(WorldError, match=r"call samestep.init_process_group\(\)"):
        samestep.gather(1)
    with samestep.World() as world:
        return world.gather([1, 2]).tolist()


def test_a_world_gathers() -> None:
    assert process_ranks(_world_of_one, 1) == [[1, 2]]
