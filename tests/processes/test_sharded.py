"""The sharded optimizer in processes: the default group, uneven inputs, killed ranks, checkpoints."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.join import Join

import samestep
from samestep import DistributedDataParallel, ShardedOptimizer
from samestep.errors import CollectiveError, OptimizerError
from samestep.optim import saving
from samestep.shm import register
from samestep.testing import RankError, process_ranks
from tests.ranks.sharding import Net, assert_same_bits, batch, plain, sharded, train
from tests.ranks.wrapping import seeded


def same_bits_in_the_world():
    for stage in (1, 2):
        for cls, options in ((optim.AdamW, {"lr": 0.01}), (optim.SGD, {"lr": 0.1, "momentum": 0.9})):
            expected = train(dist.group.WORLD, plain(cls, **options), range(3), use_in=(1,))
            found = train(dist.group.WORLD, sharded(cls, stage=stage, **options), range(3), use_in=(1,))
            assert_same_bits(found[:2], expected[:2])


def test_the_bits_of_the_plain_optimizer_over_gloo():
    process_ranks(same_bits_in_the_world, 2)


def uneven(stage):
    rank = dist.get_rank()
    results = []
    for is_sharded in (False, True):
        model = DistributedDataParallel(seeded(Net), bucket_cap_mb=0.004)
        make = sharded(optim.AdamW, lr=0.01, stage=stage) if is_sharded else plain(optim.AdamW, lr=0.01)
        optimizer = make(model)
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with model.join():
            for step in range(2 + 3 * rank):
                for micro in range(2):
                    with model.no_sync() if micro == 0 else torch.enable_grad():
                        model(batch(step + 100 * micro, rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        results.append({k: v.clone() for k, v in model.module.state_dict().items()})
        assert not getattr(optimizer, "_join_config", model._join_config).enable
    assert_same_bits(results[1], results[0])
    return results[1]


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_without_data_update_their_slices(stage):
    one, two = process_ranks(uneven, 2, stage)
    assert_same_bits(one, two)


def uneven_in_torchs_block():
    rank = dist.get_rank()
    model = DistributedDataParallel(seeded(Net))
    optimizer = ShardedOptimizer(model, optim.AdamW, lr=0.01)
    with Join([model, optimizer]):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
    return {k: v.clone() for k, v in model.module.state_dict().items()}


def test_ranks_without_data_in_torchs_block():
    one, two = process_ranks(uneven_in_torchs_block, 2)
    assert_same_bits(one, two)


class Killed(optim.SGD):
    """Rank 1 dies in the middle of its third update."""

    elementwise = True

    def step(self, closure=None):
        if dist.get_rank() == 1 and self.param_groups[0]["lr"] == 0.25:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def killed_in_mid_update(folder):
    register()
    group = dist.new_group(backend="shm")
    model = DistributedDataParallel(seeded(Net), process_group=group)
    optimizer = ShardedOptimizer(model, Killed, lr=1.0)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    state = {"model": model, "optimizer": optimizer}
    for step in range(3):
        if step == 2:
            samestep.checkpoint.save(folder, state, step=step, process_group=group, random_states=False)
        optimizer.zero_grad()
        model(batch(step, dist.get_rank())).square().mean().backward()
        if step < 2:
            optimizer.step()
            scheduler.step()
            continue
        with pytest.raises(CollectiveError, match=r"rank 1 \(process \d+\) has died"):
            optimizer.step()
    raise RuntimeError("the survivor has noticed")


def load_after_the_kill(folder):
    model = DistributedDataParallel(seeded(Net))
    optimizer = ShardedOptimizer(model, Killed, lr=1.0)
    samestep.checkpoint.load(folder, {"model": model, "optimizer": optimizer}, random_states=False)
    return optimizer.param_groups[0]["lr"]


def test_a_rank_killed_in_mid_update_is_named_and_the_checkpoint_is_whole(tmp_path):
    with pytest.raises(RankError) as caught:
        process_ranks(killed_in_mid_update, 2, str(tmp_path))
    assert "the survivor has noticed" in str(caught.value)
    assert process_ranks(load_after_the_kill, 1, str(tmp_path)) == [0.25]


def alone_with_its_state_dict():
    saving._PATIENCE = timedelta(seconds=0.5)
    model = DistributedDataParallel(nn.Linear(3, 3))
    optimizer = ShardedOptimizer(model, optim.AdamW)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        with pytest.raises(OptimizerError, match=r"not on rank\(s\) \[1\].*consolidate_state_dict"):
            optimizer.state_dict()


def test_a_rank_alone_with_its_state_dict_is_told_so():
    process_ranks(alone_with_its_state_dict, 2)
