"""Does an optimizer compute an element alike wherever in a tensor it lies? Tried out, not believed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["is_position_independent", "unhooked_step"]

_MERGING_DTYPES = (torch.float32, torch.float64)
_LONGEST = 31  # shorter than two vectors: all of it is the tail of a kernel's loop
_NUM_STEPS = 3


@torch.no_grad()
def is_position_independent(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    options: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether many short tensors, and one that holds them all, take the same steps, bit for bit.

    Some kernels round differently in the last elements of a tensor (see layout.py), fused ones for example.
    Narrow floats nearly all do, so they are not tried.

    Args:
        make: makes the optimizer from parameter groups.
        options: of the group.
        dtype: of the parameters.
        device: where they are.
    """
    if dtype not in _MERGING_DTYPES:
        return False
    generator = torch.Generator().manual_seed(0)
    sizes = list(range(1, _LONGEST + 1)) * 2

    def draw() -> torch.Tensor:
        return torch.randn(sum(sizes), generator=generator, dtype=dtype).to(device)

    start = draw()
    short = [nn.Parameter(part.clone()) for part in start.split(sizes)]
    long = nn.Parameter(start.clone())
    both = [make([{**options, "params": params}]) for params in (short, [long])]
    for _ in range(_NUM_STEPS):
        gradient = draw()
        for parameter, part in zip(short, gradient.split(sizes), strict=True):
            parameter.grad = part.clone()
        long.grad = gradient.clone()
        for optimizer in both:
            unhooked_step(optimizer)()
    return torch.equal(torch.cat([parameter.detach() for parameter in short]), long.detach())


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The step without its hooks, global ones above all: those are the outer optimizer's affair."""
    step: Any = type(optimizer).step
    plain = step.__wrapped__ if getattr(step, "hooked", False) else step
    return lambda: plain(optimizer)
