"""Gradients of V virtual ranks, played by 1, 2, 3 or 4 ranks: the same bits, and the promises around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep import DistributedDataParallel
from samestep.errors import GradientError
from samestep.testing import thread_ranks
from samestep.tree import tree_sum
from samestep.virtual import VirtualRanks, virtual_ranks

from .models import Mlp, batch_for, loss_of
from .test_shm import shm_ranks
from .wrapping import numbers, seeded

BOTH = pytest.mark.parametrize("ranks", [thread_ranks, shm_ranks], ids=["gloo", "shm"])
Train = Callable[[DistributedDataParallel, VirtualRanks], Any]


def play(
    train: Train,
    virtual_size: int,
    num_ranks: int,
    *,
    build: Callable[[], nn.Module] = Mlp,
    ranks: Callable[..., list[Any]] = thread_ranks,
    **options: Any,
) -> list[Any]:
    """What `train(wrapped model, virtual ranks)` returned on each rank."""

    def run(group: dist.ProcessGroup) -> Any:
        mine = VirtualRanks(group.rank(), num_ranks, virtual_size=virtual_size)
        virtual_ranks(group, attach=mine)
        model = DistributedDataParallel(seeded(build), process_group=group, bucket_cap_mb=0.002, **options)
        return train(model, mine)

    return ranks(run, num_ranks)


def turns(virtual: VirtualRanks, step: int, num_micro_batches: int = 1) -> Iterator[tuple[int, int]]:
    """(virtual rank, micro-batch) of each of this process's turns."""
    for position in range(*virtual.block):
        for index in range(num_micro_batches):
            with virtual.play(position, step, micro_batch=index, num_micro_batches=num_micro_batches):
                yield position, index


def three_steps(model: DistributedDataParallel, virtual: VirtualRanks) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(3):
        for position, _ in turns(virtual, step):
            inputs, targets = batch_for("mlp", 5, 10 * step + position, torch.float32)
            loss_of(model, inputs, targets).backward()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [p.detach().clone() for p in model.parameters()]


def assert_equal_bits(train: Train, virtual_size: int, rank_counts: list[int], **options: Any) -> list[Any]:
    """All ranks of all runs return the same bits; those of one rank are returned."""
    (alone,) = play(train, virtual_size, 1, **options)
    assert alone
    for num_ranks in rank_counts:
        for found in play(train, virtual_size, num_ranks, **options):
            assert len(found) == len(alone)
            for one, other in zip(found, alone, strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one, other), num_ranks
    return alone


@BOTH
@pytest.mark.parametrize(("virtual_size", "rank_counts"), [(4, [2, 3, 4]), (8, [3, 4]), (3, [2, 3])])
def test_equal_bits_whoever_plays(
    virtual_size: int, rank_counts: list[int], ranks: Callable[..., list[Any]]
) -> None:
    assert_equal_bits(three_steps, virtual_size, rank_counts, ranks=ranks)


def test_the_sum_is_the_trees() -> None:
    """Against the gradients of single models, added by hand."""

    def one_step(model: DistributedDataParallel, virtual: VirtualRanks) -> list[Tensor]:
        for position, _ in turns(virtual, 0):
            loss_of(model, *batch_for("mlp", 5, position, torch.float32)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    found = assert_equal_bits(one_step, 6, [4])
    by_hand = []
    for position in range(6):
        model = seeded(Mlp)
        loss_of(model, *batch_for("mlp", 5, position, torch.float32)).backward()
        by_hand.append([p.grad * (1 / 6) for p in model.parameters()])
    for index, gradient in enumerate(found):
        assert torch.equal(gradient, tree_sum([g[index] for g in by_hand], torch.add))


def test_deterministic_without_virtual_ranks_follows_the_tree_too() -> None:
    def one_step(group: dist.ProcessGroup) -> list[Tensor]:
        model = DistributedDataParallel(seeded(Mlp), process_group=group, deterministic=True)
        loss_of(model, *batch_for("mlp", 5, group.rank(), torch.float32)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    def with_virtual_ranks(model: DistributedDataParallel, virtual: VirtualRanks) -> list[Tensor]:
        for position, _ in turns(virtual, 0):
            loss_of(model, *batch_for("mlp", 5, position, torch.float32)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    (expected,) = play(with_virtual_ranks, 4, 1)
    for found in thread_ranks(one_step, 4):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
def test_micro_batches_of_a_virtual_rank_add_up(reduction: str) -> None:
    sizes = [3, 1, 2, 4, 2, 2, 5, 1]  # of micro-batch m of virtual rank v: 2 * v + m

    def train(model: DistributedDataParallel, virtual: VirtualRanks) -> list[Tensor]:
        found = []
        for step in range(2):
            for position, index in turns(virtual, step, 2):
                size = sizes[2 * position + index]
                inputs, targets = batch_for("mlp", size, 10 * step + 2 * position + index, torch.float32)
                loss = loss_of(model, inputs, targets)
                if reduction == "weighted":
                    loss = model.weigh(loss, size)
                loss.backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
        return found

    found = assert_equal_bits(train, 4, [2, 3], reduction=reduction)
    reference = seeded(Mlp)
    losses = [loss_of(reference, *batch_for("mlp", n, i, torch.float32)) for i, n in enumerate(sizes)]
    total = sum(loss * n for loss, n in zip(losses, sizes, strict=True)) / sum(sizes)
    {"mean": sum(losses) / 8, "sum": sum(losses), "weighted": total}[reduction].backward()
    for gradient, p in zip(found, reference.parameters(), strict=False):
        torch.testing.assert_close(gradient, p.grad)


def test_weights_make_uneven_micro_batches_the_mean_over_samples() -> None:
    sizes = [3, 3, 2, 2]

    def train(model: DistributedDataParallel, virtual: VirtualRanks) -> list[Tensor]:
        for position in range(*virtual.block):
            with virtual.play(position, 0, weight=sizes[position] * 4 / 10):
                loss_of(model, *batch_for("mlp", sizes[position], position, torch.float32)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    found = assert_equal_bits(train, 4, [2, 3, 4])
    reference = seeded(Mlp)
    losses = [loss_of(reference, *batch_for("mlp", n, i, torch.float32)) for i, n in enumerate(sizes)]
    (sum(loss * n for loss, n in zip(losses, sizes, strict=True)) / 10).backward()
    for gradient, p in zip(found, reference.parameters(), strict=True):
        torch.testing.assert_close(gradient, p.grad)


def test_several_backwards_in_a_turn_accumulate_under_no_sync() -> None:
    def train(model: DistributedDataParallel, virtual: VirtualRanks) -> list[Tensor]:
        for position, _ in turns(virtual, 0):
            with model.no_sync():
                loss_of(model, *batch_for("mlp", 2, position, torch.float32)).backward()
            loss_of(model, *batch_for("mlp", 2, 10 + position, torch.float32)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert_equal_bits(train, 4, [2, 4])


class Branches(nn.Module):
    """One branch per virtual rank, one that nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(5))
        self.table = nn.Embedding(7, 3, sparse=True)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](x).square().mean() + self.table(torch.tensor([branch, 6])).square().sum()


def test_unused_and_sparse_parameters() -> None:
    def train(model: DistributedDataParallel, virtual: VirtualRanks) -> list[Tensor | None]:
        found = []
        for step in range(3):
            for position, _ in turns(virtual, step):
                x = numbers(4, 3, seed=position + 10 * step, dtype=torch.float32)
                model(x, branch=position).backward()
            found += [None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]
            model.zero_grad()
        return found

    for options in ({}, {"find_unused_parameters": True}):
        found = assert_equal_bits(train, 4, [2, 3, 4], build=Branches, **options)
        names = [name for name, _ in seeded(Branches).named_parameters()]
        unused = {name for name, gradient in zip(names, found, strict=False) if gradient is None}
        assert unused == {"branches.4.weight", "branches.4.bias"}


def test_gradients_set_to_zero_instead_of_none_make_no_difference() -> None:
    def train(set_to_none: bool) -> Train:
        def run(model: DistributedDataParallel, virtual: VirtualRanks) -> list[Tensor]:
            found = []
            for step in range(3):
                for position, _ in turns(virtual, step):
                    loss_of(model, *batch_for("mlp", 2, position, torch.float32)).backward()
                found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                model.zero_grad(set_to_none=set_to_none)
            return found

        return run

    expected = assert_equal_bits(train(True), 4, [3])
    found = assert_equal_bits(train(False), 4, [3])
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))  # signs of zeros too


def test_narrow_gradients() -> None:
    def build() -> nn.Module:
        return Mlp().to(torch.bfloat16)

    def train(model: DistributedDataParallel, virtual: VirtualRanks) -> list[Tensor]:
        for position, _ in turns(virtual, 0):
            inputs, targets = batch_for("mlp", 5, position, torch.float32)
            loss_of(model, inputs.bfloat16(), targets).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert_equal_bits(train, 4, [2, 3, 4], build=build)


@pytest.mark.parametrize("virtual_size", [1, 2, 4, 8, 16])
def test_partial_gradients_wait_only_along_the_tree(virtual_size: int) -> None:
    def train(model: DistributedDataParallel, virtual: VirtualRanks) -> int:
        for step in range(2):
            for position, _ in turns(virtual, step):
                loss_of(model, *batch_for("mlp", 2, position, torch.float32)).backward()
            model.zero_grad()
        return model._reducer._leaves.num_copies

    (copies,) = play(train, virtual_size, 1)
    assert copies + 1 <= virtual_size.bit_length()  # the buckets are one more: log2(V / W) + 1


def test_buckets_are_launched_while_the_last_backward_goes_on() -> None:
    def train(model: DistributedDataParallel, virtual: VirtualRanks) -> tuple[int, int]:
        for step in range(3):
            for position, _ in turns(virtual, step):
                loss_of(model, *batch_for("mlp", 2, position, torch.float32)).backward()
            model.zero_grad()
        facts = model.statistics()
        return facts["num_buckets_launched_early"], facts["num_synchronised_backwards"]

    for early, backwards in play(train, 4, 2):
        assert early > 0
        assert backwards == 3


def backward(model: nn.Module, position: int = 0) -> None:
    loss_of(model, *batch_for("mlp", 2, position, torch.float32)).backward()


def outside_of_turns(model: DistributedDataParallel, virtual: VirtualRanks) -> None:
    backward(model)


def twice_in_a_turn(model: DistributedDataParallel, virtual: VirtualRanks) -> None:
    with virtual.play(0, 0):
        backward(model)
        backward(model)


def not_in_every_turn(model: DistributedDataParallel, virtual: VirtualRanks) -> None:
    with virtual.play(0, 0):
        pass
    with virtual.play(1, 0):
        backward(model)


def no_sync_over_turns(model: DistributedDataParallel, virtual: VirtualRanks) -> None:
    for _ in turns(virtual, 0):
        with model.no_sync():
            backward(model)


def no_zero_grad(model: DistributedDataParallel, virtual: VirtualRanks) -> None:
    for step in range(2):
        for _ in turns(virtual, step):
            backward(model)


def a_hook(model: DistributedDataParallel, virtual: VirtualRanks) -> None:
    model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())


def with_a_graph(model: DistributedDataParallel, virtual: VirtualRanks) -> None:
    with virtual.play(0, 0):
        loss_of(model, *batch_for("mlp", 2, 0, torch.float32)).backward(create_graph=True)


def a_raise_in_a_turn(model: DistributedDataParallel, virtual: VirtualRanks) -> None:
    def fail(_gradient: Tensor) -> None:
        raise KeyError

    with virtual.play(0, 0):
        first = next(iter(model.parameters()))
        handle = first.register_hook(fail)
        with pytest.raises(KeyError):
            backward(model)
        handle.remove()
    with virtual.play(1, 0):
        backward(model)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (outside_of_turns, "outside of their turns: take batches from samestep's loader"),
        (
            twice_in_a_turn,
            r"second synchronised backward .* virtual rank 0, step \(0,\): run all but the last",
        ),
        (
            not_in_every_turn,
            "virtual rank 0, micro-batch 0, has had its turn without a synchronised backward",
        ),
        (
            a_raise_in_a_turn,
            "virtual rank 0, micro-batch 0, has had its turn without a synchronised backward",
        ),
        (no_sync_over_turns, r"no_sync\(\) were left when the next virtual rank's turn began"),
        (no_zero_grad, r"still has the gradient of the step before.*call optimizer.zero_grad\(\)"),
        (a_hook, r"a communication hook needs a process per virtual rank.* start 2 processes"),
        (with_a_graph, r"create_graph=True\) needs a process per virtual rank"),
    ],
)
def test_refused(train: Train, message: str) -> None:
    with pytest.raises(GradientError, match=message):
        play(train, 2, 1)


def test_the_step_after_a_refusal_is_whole() -> None:
    def train(model: DistributedDataParallel, virtual: VirtualRanks) -> list[Tensor]:
        with pytest.raises(GradientError):
            not_in_every_turn(model, virtual)
        for position, _ in turns(virtual, 1):
            backward(model, position)
        return [p.grad for p in model.parameters() if p.grad is not None]

    def undisturbed(model: DistributedDataParallel, virtual: VirtualRanks) -> list[Tensor]:
        for position, _ in turns(virtual, 1):
            backward(model, position)
        return [p.grad for p in model.parameters() if p.grad is not None]

    (found,), (expected,) = play(train, 2, 1), play(undisturbed, 2, 1)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
