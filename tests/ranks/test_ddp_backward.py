"""What is synchronised, and when: decided in backward, ended in the same backward."""

from __future__ import annotations

import dataclasses
import gc
import time
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samestep import DistributedDataParallel
from samestep.errors import GradientError
from samestep.testing import thread_ranks

from .wrapping import assert_same, average, gradients, numbers, on_ranks, seeded

Grads = dict[str, Tensor | None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8).double()
        self.second = nn.Linear(8, 8).double()
        self.third = nn.Linear(8, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def local_gradients(rank: int, build: type[nn.Module] = Net, seed: int | None = None) -> Grads:
    """What one rank alone computes from its own batch."""
    model = seeded(build)
    model(numbers(3, 4, seed=rank if seed is None else seed)).sum().backward()
    return gradients(model)


EXPECTED = average([local_gradients(0), local_gradients(1)])


def run_step(model: DistributedDataParallel, rank: int, seed: int | None = None) -> Grads:
    model(numbers(3, 4, seed=rank if seed is None else seed)).sum().backward()
    return gradients(model)


@pytest.mark.parametrize("cap", [None, 1e-4, 1e-3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_views_that_survive_zero_grad(cap: float | None, set_to_none: bool) -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> tuple[Grads, bool]:
        views = [slot.view for slot in model._reducer.slots]
        same = True
        for _ in range(3):
            model.zero_grad(set_to_none=set_to_none)
            grads = run_step(model, rank)
            same &= all(p.grad is v for p, v in zip(model.parameters(), views, strict=True))
        return grads, same

    for grads, are_views in on_ranks(Net, train, bucket_cap_mb=cap):
        assert are_views
        assert_same(grads, EXPECTED, 1e-12)


def test_accumulation_without_zero_grad_adds_averages() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> Grads:
        run_step(model, rank)
        return run_step(model, rank)

    for grads in on_ranks(Net, train):
        assert_same(grads, {n: None if g is None else 2 * g for n, g in EXPECTED.items()}, 1e-12)


def test_no_sync_is_decided_in_backward() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> tuple[Grads, Grads]:
        output = model(numbers(3, 4, seed=rank)).sum()
        with model.no_sync():
            output.backward()  # the forward was outside of the block
        alone = gradients(model)
        with model.no_sync():
            output = model(numbers(3, 4, seed=rank)).sum()  # and this one inside
        output.backward()
        return alone, gradients(model)

    for rank, (alone, both) in enumerate(on_ranks(Net, train)):
        assert_same(alone, local_gradients(rank), 1e-12)
        assert_same(both, {n: None if g is None else 2 * g for n, g in EXPECTED.items()}, 1e-12)


def test_no_sync_restores_after_an_exception() -> None:
    def train(model: DistributedDataParallel, _rank: int, _size: int) -> bool:
        with pytest.raises(ZeroDivisionError), model.no_sync():
            raise ZeroDivisionError
        return model.require_backward_grad_sync

    assert on_ranks(Net, train) == [True, True]


def test_sync_gradients_needs_no_forward() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> Grads:
        with model.no_sync():
            if rank == 1:  # rank 0 has accumulated nothing
                run_step(model, rank)
        model.sync_gradients()
        return gradients(model)

    expected = {n: None if g is None else g / 2 for n, g in local_gradients(1).items()}
    for grads in on_ranks(Net, train):
        assert_same(grads, expected, 1e-12)


def test_several_forwards_then_one_backward() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> Grads:
        for _ in range(2):
            model.zero_grad()
            (model(numbers(3, 4, seed=rank)) + model(numbers(3, 4, seed=rank + 5))).sum().backward()
        return gradients(model)

    expected = average([local_gradients(0), local_gradients(1)])
    more = average([local_gradients(5), local_gradients(6)])
    total = {n: g + more[n] for n, g in expected.items() if g is not None}
    for grads in on_ranks(Net, train, bucket_cap_mb=1e-4):
        assert_same(grads, total, 1e-12)


class Looped(Net):
    """The same layer many times."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(4):
            x = torch.tanh(self.second(x))
        return self.third(x)


class Reentrant(Looped):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(4):
            x = checkpoint(lambda y: torch.tanh(self.second(y)), x, use_reentrant=True)
        return self.third(x)


class NonReentrant(Looped):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(4):
            x = checkpoint(lambda y: torch.tanh(self.second(y)), x, use_reentrant=False)
        return self.third(x)


class WhollyReentrant(Looped):
    """The outermost graph shows no parameter at all."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("build", [Looped, Reentrant, NonReentrant, WhollyReentrant])
def test_layers_that_fire_many_times(build: type[nn.Module], static_graph: bool) -> None:
    expected = average([local_gradients(0, Looped), local_gradients(1, Looped)])

    def train(model: DistributedDataParallel, rank: int, _size: int) -> Grads:
        for _ in range(3):
            model.zero_grad()
            grads = run_step(model, rank)
        return grads

    for grads in on_ranks(build, train, bucket_cap_mb=1e-4, static_graph=static_graph):
        assert_same(grads, expected, 1e-12)


def test_forward_of_a_submodule_outside_of_the_wrapper() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> Grads:
        inner = model.module
        for _ in range(2):
            model.zero_grad()
            inner(numbers(3, 4, seed=rank)).sum().backward()
        return gradients(model)

    for grads in on_ranks(Net, train, bucket_cap_mb=1e-4):
        assert_same(grads, EXPECTED, 1e-12)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 2).double() for _ in range(4))

    def forward(self, x: Tensor, choice: int) -> Tensor:
        return self.branches[choice](x)


@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_control_flow_that_differs_by_rank_and_step(find_unused_parameters: bool) -> None:
    def alone(rank: int, choice: int) -> Grads:
        model = seeded(Branches)
        model(numbers(3, 4, seed=rank), choice).sum().backward()
        return gradients(model)

    choices = [(0, 1), (2, 2), (3, 0), (1, 3)]

    def train(model: DistributedDataParallel, rank: int, _size: int) -> list[Grads]:
        found = []
        for step in choices:
            model.zero_grad()
            model(numbers(3, 4, seed=rank), step[rank]).sum().backward()
            found.append(gradients(model))
        return found

    options = {"bucket_cap_mb": 1e-5, "find_unused_parameters": find_unused_parameters}
    for steps in on_ranks(Branches, train, **options):
        for found, step in zip(steps, choices, strict=True):
            assert_same(found, average([alone(0, step[0]), alone(1, step[1])]), 1e-12)


class Passing(nn.Module):
    """An output that depends on a parameter, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x * 2


def test_a_rank_on_which_no_parameter_gets_a_gradient() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> list[Tensor | None]:
        found = []
        for _ in range(3):
            model.zero_grad()
            used, passed = model(numbers(3, 4, seed=9).requires_grad_())
            (passed if rank == 0 else used).sum().backward()
            found.append(gradients(model)["layer.weight"])
        return found

    model = seeded(Passing)
    model(numbers(3, 4, seed=9))[0].sum().backward()
    for found in on_ranks(Passing, train):
        for gradient in found:
            torch.testing.assert_close(gradient, model.layer.weight.grad / 2)


def test_gradient_by_an_input_is_no_collective() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> tuple[Grads, int]:
        x = numbers(3, 4, seed=rank).requires_grad_()
        if rank == 0:  # alone: if it were a collective, this would hang
            (by_x,) = torch.autograd.grad(model(x).sum(), x)
            model(x).sum().backward(inputs=[x])
            torch.testing.assert_close(x.grad, by_x)
        model.zero_grad()
        return run_step(model, rank), model.statistics()["num_synchronised_backwards"]

    for grads, count in on_ranks(Net, train):
        assert count == 1
        assert_same(grads, EXPECTED, 1e-12)


def test_autograd_grad_of_parameters_is_refused_unless_it_is_meant() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> Grads:
        x = numbers(3, 4, seed=rank)
        with pytest.raises(GradientError, match="this rank's data alone"):
            torch.autograd.grad(model(x).sum(), list(model.parameters()))
        with model.no_sync():
            local = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        for mine, (_, expected) in zip(local, local_gradients(rank).items(), strict=True):
            torch.testing.assert_close(mine, expected)
        return run_step(model, rank)

    for grads in on_ranks(Net, train):
        assert_same(grads, EXPECTED, 1e-12)


def test_backward_by_some_parameters_only() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> Grads:
        third = model.module.third.weight
        model(numbers(3, 4, seed=rank)).sum().backward(inputs=[third])
        return gradients(model)

    expected = {n: g if n == "third.weight" else None for n, g in EXPECTED.items()}
    for grads in on_ranks(Net, train):
        assert_same(grads, expected, 1e-12)


def test_retain_graph_and_a_second_backward() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> Grads:
        loss = model(numbers(3, 4, seed=rank)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    for grads in on_ranks(Net, train):
        assert_same(grads, {n: None if g is None else 2 * g for n, g in EXPECTED.items()}, 1e-12)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_averages_and_can_be_differentiated_again() -> None:
    """The objective |mean of gradients|^2, differentiated through the average on every rank."""
    x0, x1 = numbers(3, 4, seed=0), numbers(3, 4, seed=1)
    one = seeded(Net)
    params = list(one.parameters())
    loss = (one(x0).pow(2).sum() + one(x1).pow(2).sum()) / 2
    first = torch.autograd.grad(loss, params, create_graph=True)
    second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), params)

    def train(model: DistributedDataParallel, rank: int, _size: int) -> list[Tensor]:
        model(x0 if rank == 0 else x1).pow(2).sum().backward(create_graph=True)
        grads = [p.grad for p in model.parameters()]
        model.zero_grad()
        sum(g.pow(2).sum() for g in grads if g is not None).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for found in on_ranks(Net, train):
        for mine, expected in zip(found, second, strict=True):
            torch.testing.assert_close(mine, expected)


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: list[bool]) -> Tensor:
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.fuse[0]:
            raise ZeroDivisionError("in the middle of a backward")
        return grads[0], None


class Fragile(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fuse = [False]

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(Explodes.apply(self.second(torch.tanh(self.first(x))), self.fuse)))


@pytest.mark.parametrize("step", [0, 1])
def test_an_exception_on_all_ranks_leaves_the_wrapper_usable(step: int) -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> Grads:
        for i in range(step + 2):
            model.zero_grad()
            model.module.fuse[0] = i == step
            if i == step:
                with pytest.raises(ZeroDivisionError):
                    run_step(model, rank)
            else:
                grads = run_step(model, rank)
        return grads

    for grads in on_ranks(Fragile, train, bucket_cap_mb=1e-5):
        assert_same(grads, EXPECTED, 1e-12)


def test_an_exception_on_one_rank_reaches_the_others_when_it_goes_on() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> Grads:
        run_step(model, rank)
        model.zero_grad()
        model.module.fuse[0] = rank == 0
        expected = ZeroDivisionError if rank == 0 else GradientError
        with pytest.raises(expected, match="in the middle of"):
            run_step(model, rank)
        model.module.fuse[0] = False
        if rank == 0:
            model(numbers(3, 4))  # rank 0 goes on: only now do the others hear of it
        model.zero_grad()
        return run_step(model, rank)

    for grads in on_ranks(Fragile, train, bucket_cap_mb=1e-5):
        assert_same(grads, EXPECTED, 1e-12)


@dataclasses.dataclass
class Output:
    logits: Tensor
    extra: dict[str, Any]
    nothing: None = None


class Pair(NamedTuple):
    left: Any
    right: Any


class Plain:
    def __init__(self, value: Tensor) -> None:
        self.value = value


@pytest.mark.parametrize("shape", ["dataclass", "named tuple", "nested", "plain object"])
def test_outputs_of_any_type(shape: str) -> None:
    class Wrapping(Net):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return {
                "dataclass": lambda: Output(y, {"y": [y]}),
                "named tuple": lambda: Pair(None, Pair(y, "text")),
                "nested": lambda: [None, ({"a": (y,)}, 3)],
                "plain object": lambda: Plain(y),
            }[shape]()

    pick = {
        "dataclass": lambda o: o.logits,
        "named tuple": lambda o: o.right.left,
        "nested": lambda o: o[1][0]["a"][0],
        "plain object": lambda o: o.value,
    }[shape]

    def train(model: DistributedDataParallel, rank: int, _size: int) -> tuple[Grads, bool]:
        output = pick(model(numbers(3, 4, seed=rank)))
        watched = bool(output._backward_hooks)
        output.sum().backward()
        return gradients(model), watched

    for grads, watched in on_ranks(Wrapping, train):
        assert watched
        assert_same(grads, EXPECTED, 1e-12)


def test_tied_weights() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4).double()
            self.second = nn.Linear(4, 4).double()
            self.second.weight = self.first.weight
            self.third = nn.Linear(4, 2).double()

    expected = average([local_gradients(0, Tied), local_gradients(1, Tied)])
    for grads in on_ranks(Tied, lambda model, rank, _: run_step(model, rank), bucket_cap_mb=1e-5):
        assert_same(grads, expected, 1e-12)


def test_frozen_thawed_added_and_replaced_parameters() -> None:
    class Growing(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return self.fourth(y) if hasattr(self, "fourth") else y

    def change(net: Growing, step: int) -> None:
        if step == 1:
            net.second.requires_grad_(False)
        if step == 2:
            net.second.requires_grad_(True)
            net.fourth = seeded(lambda: nn.Linear(2, 3).double(), 7)
        if step == 3:
            net.third.weight = nn.Parameter(numbers(2, 8, seed=3))

    def alone(rank: int) -> list[Grads]:
        net, found = seeded(Growing), []
        for step in range(4):
            change(net, step)
            net.zero_grad()
            net(numbers(3, 4, seed=rank)).sum().backward()
            found.append(gradients(net))
        return found

    def train(model: DistributedDataParallel, rank: int, _size: int) -> list[Grads]:
        found = []
        for step in range(4):
            change(model.module, step)
            model.zero_grad()
            found.append(run_step(model, rank))
        return found

    expected = [average([a, b]) for a, b in zip(alone(0), alone(1), strict=True)]
    for steps in on_ranks(Growing, train, bucket_cap_mb=1e-4):
        for found, wanted in zip(steps, expected, strict=True):
            assert_same(found, wanted, 1e-12)


def test_parameters_nobody_used_keep_none_and_do_not_move() -> None:
    class Spare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(3, 3).double()

    def train(model: DistributedDataParallel, rank: int, _size: int) -> Tensor | None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        before = model.module.spare.weight.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            run_step(model, rank)
            optimizer.step()
        assert torch.equal(before, model.module.spare.weight)
        return model.module.spare.weight.grad

    assert on_ranks(Spare, train, bucket_cap_mb=1e-5) == [None, None]


def test_a_wrapper_goes_with_its_last_reference() -> None:
    """Else its hooks would go on reducing beside those of the next wrapper of the same module."""

    def run(group: Any) -> tuple[Grads, bool, int]:
        net = seeded(Net)
        model = DistributedDataParallel(net, process_group=group)
        run_step(model, group.rank())
        reducer = weakref.ref(model._reducer)
        buffer = weakref.ref(model._reducer.queue.buckets[0].buffer)
        del model
        gone = reducer() is None
        deadline = time.monotonic() + 30
        while buffer() is not None and time.monotonic() < deadline:
            time.sleep(0.01)  # Gloo's thread lets go of a tensor soon after its collective is done
        gone = gone and buffer() is None
        net.zero_grad()
        model = DistributedDataParallel(net, process_group=group)
        grads = run_step(model, group.rank())
        return grads, gone, len(net.first.weight._post_accumulate_grad_hooks)

    gc.disable()
    try:
        results = thread_ranks(run, 2)
    finally:
        gc.enable()
    for grads, gone, num_hooks in results:
        assert gone
        assert num_hooks == 1
        assert_same(grads, EXPECTED, 1e-12)


def test_a_module_that_is_wrapped_again_is_the_new_wrappers_alone() -> None:
    def run(group: Any) -> Grads:
        net = seeded(Net)
        old = DistributedDataParallel(net, process_group=group)
        run_step(old, group.rank())
        net.zero_grad()
        new = DistributedDataParallel(net, process_group=group)
        outer = DistributedDataParallel(new, process_group=group)  # and a wrapper in a wrapper
        grads = run_step(outer, group.rank())
        counts = [w.statistics()["num_synchronised_backwards"] for w in (old, new, outer)]
        assert counts == [1, 0, 1]
        return {name.removeprefix("module."): g for name, g in grads.items()}

    for grads in thread_ranks(run, 2):
        assert_same(grads, EXPECTED, 1e-12)


def test_two_wrappers_in_one_backward() -> None:
    def run(group: Any) -> tuple[Grads, Grads]:
        one = DistributedDataParallel(seeded(Net), process_group=group)
        two = DistributedDataParallel(seeded(Net), process_group=group)
        rank = group.rank()
        (one(numbers(3, 4, seed=rank)) + two(numbers(3, 4, seed=rank))).sum().backward()
        return gradients(one), gradients(two)

    for one, two in thread_ranks(run, 2):
        assert_same(one, EXPECTED, 1e-12)
        assert_same(two, EXPECTED, 1e-12)
