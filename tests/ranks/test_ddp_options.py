"""Options of torch's class that change what is computed: mixed precision, optimizers in backward, ..."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from samestep import DistributedDataParallel
from samestep.errors import GradientError
from samestep.testing import process_ranks

from .wrapping import gradients, numbers, on_ranks, seeded


class Watching(nn.Module):
    """Notes the dtypes that its forward meets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [x.dtype, self.layer.weight.dtype, self.norm.running_mean.dtype]
        return self.norm(self.layer(x))


@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_mixed_precision(reduce_dtype: torch.dtype | None) -> None:
    policy = _MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, buffer_dtype=torch.bfloat16
    )

    def train(model: DistributedDataParallel, rank: int, _size: int) -> Any:
        model(numbers(8, 4, seed=rank, dtype=torch.float32)).float().pow(2).sum().backward()
        weights = [p.dtype for p in model.parameters()]
        return model.module.seen, weights, gradients(model)

    found = on_ranks(Watching, train, mixed_precision=policy)
    for seen, weights, grads in found:
        assert seen == [torch.bfloat16] * 3
        assert weights == [torch.float32] * 4
        assert all(g.dtype == torch.float32 for g in grads.values())
    for name, mine in found[0][2].items():
        assert torch.equal(mine, found[1][2][name])
        assert mine.abs().sum() > 0 or name == "layer.bias"


def _step_in_backward(before_wrapping: bool) -> tuple[list[Tensor], bool]:
    from torch.distributed.optim import _apply_optimizer_in_backward

    net = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double())
    if before_wrapping:
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(net, bucket_cap_mb=1e-4)
    if not before_wrapping:
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    for step in range(3):
        model(numbers(3, 4, seed=step + 10 * dist.get_rank())).sum().backward()
    return [p.detach() for p in net.parameters()], all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("before_wrapping", [True, False])
def test_optimizers_in_backward_step_on_averages(before_wrapping: bool) -> None:
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (net(numbers(3, 4, seed=step + 10 * rank)).sum() / 2).backward()
        optimizer.step()
    for weights, gone in process_ranks(_step_in_backward, 2, before_wrapping):
        assert gone
        for mine, expected in zip(weights, net.parameters(), strict=True):
            torch.testing.assert_close(mine, expected)


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_parameters_unused_in_the_first_backward_can_be_left_out() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> tuple[int, Any]:
        for _ in range(3):
            model.zero_grad()
            model(numbers(3, 4, seed=rank, dtype=torch.float32)).sum().backward()
        return sum(len(names) for names in model.bucket_plan.buckets), gradients(model)

    plain = on_ranks(Spare, train)
    for (num, grads), (_, expected) in zip(
        on_ranks(Spare, train, skip_all_reduce_unused_params=True), plain, strict=True
    ):
        assert num == 2
        assert grads["spare.weight"] is None
        assert torch.equal(grads["used.weight"], expected["used.weight"])


def test_ignored_parameters_and_buffers_are_left_alone() -> None:
    class Own(Watching):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.zeros(3))
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                self, ["own", "norm.running_mean"]
            )

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + self.own)

    def train(model: DistributedDataParallel, rank: int, _size: int) -> tuple[Tensor, Tensor]:
        model(numbers(8, 4, seed=rank, dtype=torch.float32)).pow(2).sum().backward()
        model(numbers(8, 4, seed=rank, dtype=torch.float32))
        return model.module.own.grad, model.module.norm.running_mean

    (grad0, mean0), (grad1, mean1) = on_ranks(Own, train)
    assert not torch.equal(grad0, grad1)
    assert not torch.equal(mean0, mean1)


def test_functional_call_leaves_the_modules_own_parameters_alone() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> bool:
        other = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        x = numbers(3, 4, seed=rank, dtype=torch.float32)
        torch.func.functional_call(model, other, (x,)).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        model(x).sum().backward()
        return model.module.used.weight.grad is not None

    assert on_ranks(Spare, train) == [True, True]


def test_module_hooks_run_once_each() -> None:
    def train(model: DistributedDataParallel, rank: int, _size: int) -> dict[str, int]:
        counts = dict.fromkeys(["pre", "forward", "backward", "outer"], 0)

        def count(name: str) -> Any:
            def hook(*_: Any) -> None:
                counts[name] += 1

            return hook

        model.module.used.register_forward_pre_hook(count("pre"))
        model.module.used.register_forward_hook(count("forward"))
        model.module.used.register_full_backward_hook(count("backward"))
        model.register_full_backward_hook(count("outer"))
        x = numbers(3, 4, seed=rank, dtype=torch.float32).requires_grad_()
        model(x).sum().backward()
        return counts

    assert on_ranks(Spare, train) == [{"pre": 1, "forward": 1, "backward": 1, "outer": 1}] * 2


def test_arguments_that_contradict_each_other() -> None:
    def train(model: DistributedDataParallel, _rank: int, _size: int) -> None:
        group = model.process_group
        with pytest.raises(GradientError, match="set at the same time"):
            DistributedDataParallel(Spare(), process_group=group, delay_all_reduce_named_params=[])
        with pytest.raises(GradientError, match='in MiB or "auto"'):
            DistributedDataParallel(Spare(), process_group=group, bucket_cap_mb="large")
        with pytest.raises(GradientError, match="Cannot specify both"):
            DistributedDataParallel(Spare(), process_group=group, device_mesh=object())
        with pytest.raises(GradientError, match="bucket_cap_mb_list is empty"):
            DistributedDataParallel(Spare(), process_group=group, bucket_cap_mb_list=[])

    on_ranks(Spare, train, 1)


def _over_a_mesh() -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    model = DistributedDataParallel(seeded(Spare), device_mesh=mesh)
    model(numbers(3, 4, seed=dist.get_rank(), dtype=torch.float32)).sum().backward()
    return [model.module.used.weight.grad]


def test_a_device_mesh_names_the_group() -> None:
    one, two = process_ranks(_over_a_mesh, 2)
    assert torch.equal(one[0], two[0])
