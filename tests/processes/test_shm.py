"""The backend "shm" between real processes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from samestep.shm import register
from samestep.testing import process_ranks


def over_shm(*args):
    """Make the rank's default group again, over "shm", with the store of the one it has."""
    store = dist.PrefixStore("shm", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    register()
    dist.init_process_group("shm", store=store, rank=rank, world_size=size)
    return dist.group.WORLD


def sums(numels):
    group = over_shm()
    rank, size = group.rank(), group.size()
    for numel in numels:
        private = torch.arange(numel, dtype=torch.float32) * (rank + 1)
        shared = group.empty_shared(numel, torch.float32).copy_(private)
        expected = torch.arange(numel, dtype=torch.float32) * (size * (size + 1) // 2)
        for tensor in (private, shared):
            dist.all_reduce(tensor)
            assert torch.equal(tensor, expected), numel
    return os.getpid()


def test_all_reduce_of_private_and_shared_tensors_of_any_size():
    numels = [0, 1, 5, 16384, 16385, 300_001]
    assert len(set(process_ranks(sums, 2, numels))) == 2
    assert len(set(process_ranks(sums, 3, numels))) == 3
