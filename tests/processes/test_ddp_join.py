"""Uneven inputs. In processes, for torch's Join calls functions that only know registered groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from samestep import DistributedDataParallel
from samestep.errors import GradientError
from samestep.testing import process_ranks
from tests.ranks.wrapping import numbers, seeded


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()


def _train_unevenly(divide_by_initial: bool, accumulate: bool) -> tuple[list[Tensor], list[Tensor], bool]:
    rank = dist.get_rank()
    model = DistributedDataParallel(seeded(lambda: nn.Linear(4, 2).double()), bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=divide_by_initial):
        for step in range(4 - 2 * rank):  # rank 0: four steps, rank 1: two
            if accumulate:
                with model.no_sync():
                    model(numbers(3, 4, seed=10 * step + rank)).sum().backward()
            optimizer.zero_grad() if not accumulate else None
            model(numbers(3, 4, seed=100 * step + rank)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = [p.detach().clone() for p in model.parameters()]
    # Nothing is left of the block: a step of its own on rank 0 would hang if join still announced steps.
    with model.no_sync():
        model(numbers(3, 4))
    model.zero_grad()
    model(numbers(3, 4)).sum().backward()
    return weights, [p.grad for p in model.parameters()], model._join_config.enable


@pytest.mark.parametrize("divide_by_initial", [True, False])
@pytest.mark.parametrize("accumulate", [True, False])
def test_uneven_steps_equal_one_process(divide_by_initial: bool, accumulate: bool) -> None:
    net = seeded(lambda: nn.Linear(4, 2).double())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        active = [0, 1] if step < 2 else [0]
        optimizer.zero_grad()
        for rank in active:
            divisor = 2 if divide_by_initial else len(active)
            if accumulate:
                (net(numbers(3, 4, seed=10 * step + rank)).sum() / divisor).backward()
            (net(numbers(3, 4, seed=100 * step + rank)).sum() / divisor).backward()
        optimizer.step()
    results = process_ranks(_train_unevenly, 2, divide_by_initial, accumulate)
    for weights, _, still_joining in results:
        assert not still_joining
        for mine, expected in zip(weights, net.parameters(), strict=True):
            torch.testing.assert_close(mine, expected)
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def _train_with_buffers_and_zero() -> tuple[list[Tensor], list[Tensor]]:
    rank = dist.get_rank()
    model = DistributedDataParallel(seeded(_net))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    with Join([model, optimizer]):
        for step in range(3 + 2 * rank):  # rank 0, whose buffers are sent otherwise, ends first
            optimizer.zero_grad()
            model(numbers(5, 4, seed=step + 7 * rank)).pow(2).sum().backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()], list(model.buffers())


def test_buffers_and_other_joinables_in_torchs_own_block() -> None:
    one, two = process_ranks(_train_with_buffers_and_zero, 2)
    for mine, other in zip([*one[0], *one[1]], [*two[0], *two[1]], strict=True):
        assert torch.equal(mine, other)


def _raise_inside(where: str) -> str:
    rank = dist.get_rank()
    model = DistributedDataParallel(seeded(_net))
    try:
        with model.join():
            # Rank 2, if there is one, has joined long since.
            for step in range(6 if rank < 2 else 1):
                loss = model(numbers(5, 4, seed=step)).sum()
                if rank == 1 and step == 2:
                    if where == "in backward":
                        loss.register_hook(lambda _g: 1 / 0)
                    else:
                        raise ZeroDivisionError
                loss.backward()
    except (ZeroDivisionError, GradientError) as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


@pytest.mark.parametrize("where", ["in backward", "between"])
def test_a_rank_that_raises_inside_ends_the_block_on_all(where: str) -> None:
    found = process_ranks(_raise_inside, 3, where)
    assert found[1].startswith("ZeroDivisionError")
    for rank in (0, 2):
        assert "gave up" in found[rank] or "rank 1 raised inside of join()" in found[rank]


def _early() -> str:
    model = DistributedDataParallel(seeded(_net))
    try:
        with model.join(throw_on_early_termination=True):
            for _ in range(2 + dist.get_rank()):
                model(numbers(5, 4)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "ended"


def test_throw_on_early_termination() -> None:
    zero, one = process_ranks(_early, 2)
    assert "Rank 0 exhausted all inputs" in zero
    assert "exhausted inputs" in one


def _disagree() -> None:
    model = DistributedDataParallel(seeded(_net))
    with model.join(enable=True):
        model.require_backward_grad_sync = dist.get_rank() == 0
        model(numbers(5, 4))


def _disagreement() -> str:
    with pytest.raises(GradientError) as caught:
        _disagree()
    return str(caught.value)


def test_no_sync_on_some_ranks_only_is_refused() -> None:
    for text in process_ranks(_disagreement, 2):
        assert "ranks [0] synchronise this step and the other active ones do not" in text
