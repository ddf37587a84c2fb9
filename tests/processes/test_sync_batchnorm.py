"""SyncBatchNorm where ranks must be processes: in join blocks, in torch's wrapper, compiled, over "shm"."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from samestep import DistributedDataParallel, ShardedOptimizer, SyncBatchNorm
from samestep.errors import GradientError
from samestep.shm import register
from samestep.testing import process_ranks
from tests.ranks.wrapping import numbers, seeded


def _net() -> nn.Module:
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)]
    return nn.Sequential(*layers).double()


def _synchronised() -> Any:
    return SyncBatchNorm.convert_sync_batchnorm(seeded(_net))


def _state(net: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in net.state_dict().values()]


def _batch(step: int, rank: int) -> Tensor:
    return numbers(2 + rank, 4, seed=100 * step + rank) + rank


def _num_steps(rank: int) -> int:
    return [5, 1, 3][rank]


def _loss(net: nn.Module, batch: Tensor) -> Tensor:
    return net(batch).pow(2).sum()


# Join


def _train_unevenly(accumulate: bool, leftover: bool, sharded: bool) -> tuple[list[Tensor], list[Tensor]]:
    rank = dist.get_rank()
    model = DistributedDataParallel(_synchronised(), bucket_cap_mb=1e-4)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if sharded:
        optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.01)
    for _ in range(2):  # a block leaves nothing behind that another one would mind
        with model.join():
            for step in range(_num_steps(rank)):
                if accumulate:
                    with model.no_sync():
                        _loss(model, _batch(step + 50, rank)).backward()
                _loss(model, _batch(step, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
            if leftover:  # a micro-batch that no step follows
                with model.no_sync():
                    _loss(model, _batch(90, rank)).backward()
                optimizer.zero_grad()
    state = _state(model.module)
    _loss(model, _batch(0, rank)).backward()  # without rounds again
    return state, [] if sharded else [p.grad for p in model.parameters()]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_uneven_steps_equal_one_process(accumulate: bool, sharded: bool) -> None:
    net = seeded(_net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in [*range(5), *range(5)]:
        active = [rank for rank in range(3) if step < _num_steps(rank)]
        for first in (50, 0) if accumulate else (0,):
            batch = torch.cat([_batch(step + first, rank) for rank in active])
            (_loss(net, batch) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    results = process_ranks(_train_unevenly, 3, accumulate, False, sharded)
    for state, grads in results:
        for mine, expected in zip(state, _state(net), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10)
        assert all(torch.equal(a, b) for a, b in zip(grads, results[0][1], strict=True))


def test_a_micro_batch_left_over_meets_the_others() -> None:
    results = process_ranks(_train_unevenly, 3, True, True, False)
    for found in zip(*(state + grads for state, grads in results), strict=True):
        assert all(torch.equal(tensor, found[0]) for tensor in found)


def _train_in_torchs_block(accumulate: bool) -> list[Tensor]:
    rank = dist.get_rank()
    model = DistributedDataParallel(_synchronised())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    # ZeroRedundancyOptimizer answers every forward of the others with a step: none may only accumulate.
    with Join([model] if accumulate else [model, optimizer]):
        for step in range(1 + 2 * rank):
            if accumulate:
                with model.no_sync():
                    _loss(model, _batch(step + 50, rank)).backward()
            _loss(model, _batch(step, rank)).backward()
            if not accumulate:
                optimizer.step()
            model.zero_grad()
        if accumulate:  # a micro-batch left over
            with model.no_sync():
                _loss(model, _batch(90, rank)).backward()
    return _state(model.module)


@pytest.mark.parametrize("accumulate", [False, True])
def test_torchs_own_block(accumulate: bool) -> None:
    one, two = process_ranks(_train_in_torchs_block, 2, accumulate)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def _checkpointed() -> list[Tensor]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _synchronised()

        def forward(self, batch: Tensor) -> Tensor:
            half = torch.utils.checkpoint.checkpoint(self.layers[:3], batch, use_reentrant=True)
            return self.layers[3:](half)

    rank = dist.get_rank()
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with model.join():
        for step in range(_num_steps(rank)):
            _loss(model, _batch(step, rank).requires_grad_()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return _state(model.module)


def test_layers_that_run_again_in_backward_are_followed_too() -> None:
    states = process_ranks(_checkpointed, 3)
    assert all(torch.equal(a, b) for state in states[1:] for a, b in zip(state, states[0], strict=True))


def _raise_inside(where: str, num_joined: int) -> str:
    rank = dist.get_rank()
    model = DistributedDataParallel(_synchronised())
    try:
        with model.join():
            for step in range(1 if rank < num_joined else 4):
                raises = rank == 2 and step == 2
                if raises and where == "forward":
                    model.module[2].register_forward_hook(lambda *_: 1 / 0)
                loss = _loss(model, _batch(step, rank))
                if raises and where == "backward":
                    next(model.module[2].parameters()).register_hook(lambda _g: 1 / 0)
                if raises and where == "between":
                    raise ZeroDivisionError
                loss.backward()
    except (ZeroDivisionError, GradientError) as error:
        found = f"{type(error).__name__}: {error}"
    else:
        found = "ended"
    if where == "between":  # the ranks are in step after the block
        _loss(model, _batch(0, rank)).backward()
    return found


@pytest.mark.parametrize("num_joined", [0, 1])
@pytest.mark.parametrize("where", ["forward", "between", "backward"])
def test_a_rank_that_raises_inside_ends_the_block_on_all(where: str, num_joined: int) -> None:
    found = process_ranks(_raise_inside, 3, where, num_joined)
    assert found[2].startswith("ZeroDivisionError")
    for text in found[:2]:
        assert "rank 2 raised inside of join()" in text


def _run_what_is_refused(what: str) -> None:
    rank = dist.get_rank()
    group = dist.new_group([0, 1]) if what == "group" else None
    net = SyncBatchNorm.convert_sync_batchnorm(seeded(_net), group)
    model = DistributedDataParallel(net)
    with model.join():
        if what == "outside":
            net(_batch(0, rank))
        elif what == "layers" and rank == 1:
            model.module[1].eval()
        for step in range(2):
            _loss(model, _batch(step, rank)).backward()


def _refused(what: str) -> str:
    with pytest.raises(GradientError) as caught:
        _run_what_is_refused(what)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("group", r"1 \(SyncBatchNorm\) has another process group"),
        ("outside", r"1 \(SyncBatchNorm, in training mode\) ran outside of a step"),
        ("layers", r"do not run the same layers: rank 0: in 1; rank 1: in 3"),
    ],
)
def test_what_cannot_be_followed_is_refused(what: str, message: str) -> None:
    for text in process_ranks(_refused, 2, what):
        assert re.search(message, text), text


def _join_to_the_first_end() -> None:
    model = DistributedDataParallel(_synchronised())
    with model.join(throw_on_early_termination=True):
        for step in range(2 + dist.get_rank()):
            _loss(model, _batch(step, dist.get_rank())).backward()


def _early() -> str:
    with pytest.raises(RuntimeError) as caught:
        _join_to_the_first_end()
    return str(caught.value)


def test_throw_on_early_termination() -> None:
    zero, one = process_ranks(_early, 2)
    assert "Rank 0 exhausted all inputs" in zero
    assert "exhausted inputs" in one


# Other surroundings


def _train(how: str) -> list[Tensor]:
    rank = dist.get_rank()
    if how == "shm":
        store = dist.PrefixStore("shm", dist.distributed_c10d._get_default_store())
        size = dist.get_world_size()
        dist.barrier()  # the others may still be connecting
        dist.destroy_process_group()
        register()
        dist.init_process_group("shm", store=store, rank=rank, world_size=size)
    net = _synchronised()
    if how == "torch":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: nn.Module = nn.parallel.DistributedDataParallel(net)
    else:
        model = DistributedDataParallel(net)
    run = torch.compile(model, backend="eager") if how == "compiled" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        _loss(run, _batch(step, rank)).backward()
        optimizer.step()
    return _state(net)


@pytest.mark.parametrize("how", ["shm", "torch", "compiled"])
def test_steps_are_those_of_one_process(how: str) -> None:
    net = seeded(_net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        (_loss(net, torch.cat([_batch(step, rank) for rank in range(2)])) / 2).backward()
        optimizer.step()
    for state in process_ranks(_train, 2, how):
        for mine, expected in zip(state, _state(net), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10)
