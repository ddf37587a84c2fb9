"""A model and a training loop for tests of the sharded optimizer, beside the plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep import DistributedDataParallel, ShardedOptimizer

from .wrapping import numbers, seeded

Optimizer = torch.optim.Optimizer
Make = Callable[[nn.Module], Optimizer]
CAP_MB = 0.004  # several buckets even of a small model


class Lion(torch.optim.Optimizer):
    """An element-wise optimizer that torch does not ship (arXiv:2302.06675)."""

    elementwise = True

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                fast, slow = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = (state["momentum"] * fast + p.grad * (1 - fast)).sign()
                p.add_(update, alpha=-group["lr"])
                state["momentum"].mul_(slow).add_(p.grad, alpha=1 - slow)


class Net(nn.Module):
    """Odd sizes, a channels_last convolution, a tied weight, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.conv.to(memory_format=torch.channels_last)
        self.first = nn.Linear(8 * 9, 65)
        self.norm = nn.LayerNorm(65)
        self.tied = nn.Linear(65, 65, bias=False)
        self.twin = nn.Linear(65, 65)
        self.twin.weight = self.tied.weight
        self.frozen = nn.Linear(65, 70).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(33))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(70, 5)

    def forward(self, x: Tensor, *, use: bool = False) -> Tensor:
        x = self.conv(x.view(-1, 3, 3, 3)).flatten(1)
        x = self.norm(self.first(x)).tanh()
        x = self.frozen(self.twin(self.tied(x).tanh())) * self.scale
        out = self.head(x)
        return out + self.unused.sum() if use else out


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return numbers(4, 27, seed=100 * step + rank, dtype=dtype)


def train(
    group: dist.ProcessGroup,
    make: Make,
    steps: range = range(4),
    *,
    build: Callable[[], nn.Module] = Net,
    dtype: torch.dtype = torch.float32,
    before_step: Callable[[nn.Module, Optimizer], None] = lambda model, optimizer: None,
    each_step: Callable[[int, nn.Module, Optimizer], None] = lambda step, model, optimizer: None,
    micro_batches: int = 1,
    use_in: tuple[int, ...] = (),
    start: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], Any, nn.Module, Optimizer]:
    """(weights, state, wrapped model, optimizer) here; `options` are the wrapper's."""
    model = DistributedDataParallel(
        seeded(build).to(dtype), process_group=group, bucket_cap_mb=CAP_MB, **options
    )
    start = copy.deepcopy(start)  # ranks are threads, and a plain optimizer goes on in the memory it is given
    if start is not None:
        model.module.load_state_dict(start["model"])
    optimizer = make(model)
    if start is not None:
        optimizer.load_state_dict(start["optimizer"])
    for step in steps:
        optimizer.zero_grad()
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            with nullcontext() if last else model.no_sync():
                x = batch(step + 1000 * micro, group.rank(), dtype)
                out = model(x, use=step in use_in) if build is Net else model(x)
                out.square().mean().backward()
        before_step(model, optimizer)
        optimizer.step()
        each_step(step, model, optimizer)
    weights = {name: value.detach().clone() for name, value in model.module.state_dict().items()}
    return weights, optimizer.state_dict(), model, optimizer


def sharded(cls: Any, **options: Any) -> Make:
    """Makes our optimizer."""
    return lambda model: ShardedOptimizer(model, cls, **options)


def plain(cls: Any, **options: Any) -> Make:
    """Makes the class's own."""
    return lambda model: cls(model.parameters(), **options)


def assert_same_bits(one: Any, other: Any, path: str = "") -> None:
    """Equal types, keys, shapes, dtypes, strides and bits, all the way down."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), f"{path}: {one.keys()} against {other.keys()}"
        for key in one:
            assert_same_bits(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same_bits(a, b, f"{path}/{i}")
    elif isinstance(one, Tensor):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride()), path
        same = torch.equal(one, other) or torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
        assert same, f"{path}: {(one - other).abs().max()}"
    else:
        assert one == other, f"{path}: {one} against {other}"
