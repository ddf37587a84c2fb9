"""Buckets go out while backward runs, in the order in which it fills them; sizes are tuned."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep import DistributedDataParallel, collectives
from samestep.errors import GradientError
from samestep.gradients import queue as queue_module
from samestep.gradients.buckets import BucketPlan
from samestep.gradients.tuner import CANDIDATES_MB, CapTuner
from samestep.testing import thread_ranks

from .wrapping import assert_same, gradients, numbers, on_ranks, seeded


class _Sleep(torch.autograd.Function):
    """Identity whose backward takes a while and notes when it began."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str], name: str) -> Tensor:
        ctx.log, ctx.name = log, name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(0.02)
        ctx.log.append(f"backward of {ctx.name}")
        return grads[0], None, None


class Sleepy(nn.Module):
    """Layers that sleep in backward; registered in another order than they run in, if asked."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.log: list[str] = []
        for name in names:
            self.add_module(name, nn.Linear(4, 4).double())

    def forward(self, x: Tensor) -> Tensor:
        for name in "abcd":
            x = _Sleep.apply(getattr(self, name)(x), self.log, name)
        return x


def _logged_steps(group: dist.ProcessGroup, names: str, steps: int) -> list[list[str]]:
    net = seeded(lambda: Sleepy(names))
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=1e-5)  # one layer's tensor each
    queue = model._reducer.queue
    launch = queue._launch

    def logged(bucket: Any, scale: float, *, abandoned: bool) -> None:
        net.log.append(f"launch of {bucket.slots[0].name[0]}")
        launch(bucket, scale, abandoned=abandoned)

    queue._launch = logged  # type: ignore[method-assign]
    logs = []
    for _ in range(steps):
        net.log.clear()
        model(numbers(2, 4, seed=group.rank())).sum().backward()
        logs.append(list(dict.fromkeys(net.log)))
    return logs


def test_buckets_go_out_while_backward_runs() -> None:
    for first, second in thread_ranks(lambda group: _logged_steps(group, "abcd", 2), 2):
        backward = [f"backward of {name}" for name in "dcba"]
        assert first[:4] == backward  # the first backward only looks
        expected = [entry for name in "dcba" for entry in (f"backward of {name}", f"launch of {name}")]
        assert second == expected


def test_the_order_of_launch_is_that_in_which_backward_fills_them() -> None:
    for _, second in thread_ranks(lambda group: _logged_steps(group, "dcba", 2), 2):
        expected = [entry for name in "dcba" for entry in (f"backward of {name}", f"launch of {name}")]
        assert second == expected


def test_the_order_is_agreed_where_ranks_differ() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4).double()
            self.b = nn.Linear(4, 4).double()
            self.b_first = False

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.b(x)) if self.b_first else self.b(self.a(x))

    def train(model: DistributedDataParallel, rank: int, _size: int) -> list[int]:
        model.module.b_first = rank == 0
        for _ in range(3):
            model.zero_grad()
            model(numbers(2, 4, seed=rank)).sum().backward()
        return model.statistics()["launch_order"]

    orders = on_ranks(Either, train, bucket_cap_mb=1e-5)
    assert orders[0] == orders[1]
    plan = ("b.bias", "b.weight", "a.bias", "a.weight")
    assert [plan[i][0] for i in orders[0]] == ["a", "a", "b", "b"]  # rank 0's backward


def test_a_plan_is_a_function_of_the_model_and_survives_json() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> tuple[str, bool, Any]:
        before = model.bucket_plan
        for _ in range(2):
            model(numbers(2, 4, seed=rank)).sum().backward()
        plan = BucketPlan.from_json(before.to_json())
        other = seeded(lambda: nn.Linear(4, 4).double())
        twin = DistributedDataParallel(other, process_group=model.process_group)
        with pytest.raises(GradientError, match="another model"):
            twin.use_bucket_plan(plan)
        model.use_bucket_plan(plan)
        model.zero_grad()
        model(numbers(2, 4, seed=rank)).sum().backward()
        return str(model.bucket_plan), model.bucket_plan == before, gradients(model)

    for text, same, found in on_ranks(lambda: Sleepy("abcd"), train, bucket_cap_mb=1e-5):
        assert same
        assert text.startswith("8 buckets, launched in this order:")
        assert "d.bias" in text.splitlines()[1]
        assert found["a.weight"] is not None


def test_the_tuner_settles_within_50_steps_on_one_size_for_all() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> tuple[float, bool, int]:
        for step in range(50):
            model.zero_grad()
            model(numbers(2, 600, seed=step + rank, dtype=torch.float32)).sum().backward()
        tuner = model._tuner
        assert tuner is not None
        return tuner.cap_mb, tuner.settled, len(model.bucket_plan.buckets)

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(600, 600) for _ in range(5)))  # 7 MiB

    one, two = on_ranks(build, train, bucket_cap_mb="auto")
    assert one == two
    assert one[0] in CANDIDATES_MB
    assert one[1]


def test_the_tuner_takes_the_size_that_is_fastest_on_the_slowest_rank() -> None:
    # Sizes below 12 MiB and one above. 5 MiB is the fastest on rank 0 and the slowest on rank 1.
    costs = {5.0: (1.0, 9.0), 10.0: (3.0, 3.0), 2.0: (5.0, 5.0), 100.0: (4.0, 4.0)}

    def tune(group: dist.ProcessGroup) -> float:
        now = [0.0]
        tuner = CapTuner(12.0, group, clock_s=lambda: now[0])
        for _ in range(50):
            now[0] += costs[tuner.cap_mb][group.rank()]
            tuner.after_backward()
        assert tuner.settled
        return tuner.cap_mb

    assert thread_ranks(tune, 1) == [5.0]
    assert thread_ranks(tune, 2) == [10.0, 10.0]


def test_a_change_of_parameters_on_one_rank_only_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import samestep.gradients.ddp as ddp

    meet = ddp.meet
    monkeypatch.setattr(
        ddp, "meet", lambda group, key, reason: meet(group, key, reason, patience=timedelta(seconds=0.3))
    )

    def train(model: DistributedDataParallel, rank: int, _size: int) -> None:
        if rank == 0:
            model.module.a.requires_grad_(False)
            with pytest.raises(
                GradientError, match=r"no longer: \['a.weight', 'a.bias'\].*not on rank\(s\) \[1\]"
            ):
                model(numbers(2, 4))
        else:
            time.sleep(0.6)

    on_ranks(lambda: Sleepy("abcd"), train)


def test_a_failed_reduction_says_what_each_rank_was_doing() -> None:
    def run(group: dist.ProcessGroup) -> str:
        model = DistributedDataParallel(seeded(lambda: Sleepy("abcd")), process_group=group)
        model(numbers(2, 4)).sum().backward()
        if group.rank() == 2:
            return ""  # leaves the others alone
        with pytest.raises(GradientError) as caught:
            model(numbers(2, 4)).sum().backward()
        return str(caught.value)

    texts = thread_ranks(run, 3, timeout=timedelta(seconds=2))
    for rank in (0, 1):
        assert texts[rank].startswith(f"rank {rank} of 3: synchronised backward 2 of model")
        assert "bucket 0 (d.bias ... a.weight), 1 of 1, was not reduced" in texts[rank]
        assert "rank 0: waits in synchronised backward 2" in texts[rank]
        assert "rank 1: waits in synchronised backward 2" in texts[rank]
        assert "rank 2: has ended, or is not in a synchronised backward of this model" in texts[rank]


def test_static_graph_is_a_promise_that_is_checked() -> None:
    class Choosy(Sleepy):
        skip = False

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if self.skip else self.b(self.a(x))

    def train(model: DistributedDataParallel, rank: int, _size: int) -> None:
        for _ in range(2):
            model(numbers(2, 4, seed=rank)).sum().backward()
        model.module.skip = True
        with pytest.raises(GradientError, match=r"training graph has changed.*b.weight \(1 -> 0 times\)"):
            model(numbers(2, 4, seed=rank)).sum().backward()

    on_ranks(lambda: Choosy("ab"), train, static_graph=True)


def test_the_reducer_calls_collectives_through_one_module() -> None:
    assert queue_module.collectives is collectives


def test_compiled_inside_and_outside_gives_the_same_and_keeps_the_cuts() -> None:
    """The eager backend of torch.compile: the graph is captured and cut, nothing is generated."""
    graphs: list[int] = []

    def counting(graph: Any, _inputs: Any) -> Any:
        graphs.append(len(list(graph.graph.nodes)))
        return graph.forward

    class Tall(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512).double() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    def run(group: dist.ProcessGroup) -> list[dict[str, Tensor | None]]:
        x = numbers(2, 512, seed=group.rank())
        found = []
        for how in ("eager", "inside", "outside"):
            torch._dynamo.reset()
            net = seeded(Tall)
            if how == "inside":
                net = torch.compile(net, backend=counting)
            model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=3)
            call = torch.compile(model, backend=counting) if how == "outside" else model
            for _ in range(2):
                model.zero_grad()
                call(x).sum().backward()
            grads = gradients(model)
            found.append({name.replace("_orig_mod.", ""): g for name, g in grads.items()})
            if how != "eager":
                assert len(graphs) >= 3, f"{how}: the graph was not cut at the buckets' ends"
                graphs.clear()
        return found

    ((eager, inside, outside),) = thread_ranks(run, 1)
    assert_same(inside, eager, 1e-12)
    assert_same(outside, eager, 1e-12)
