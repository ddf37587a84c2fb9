"""Gradients that keep their graph: `backward(create_graph=True)` on every rank, averaged all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["average_with_graph"]

SumOverRanks = Callable[[Tensor], object]


class _Average(torch.autograd.Function):
    """The mean over the ranks; so is its derivative: [Note: Mean of means].

    With g = mean_r g_r and objectives L_r(g), the ranks together minimise mean_r L_r. The gradient by g_r
    is then mean_s dL_s/dg on every rank, and what flows on from it into parameters is averaged over the
    ranks by the backward that it flows in.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, sum_over_ranks: SumOverRanks, scale: float) -> Tensor:
        ctx.sum_over_ranks, ctx.scale = sum_over_ranks, scale
        total = gradient.detach().clone(memory_format=torch.contiguous_format)
        sum_over_ranks(total)
        return total.mul_(scale)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        return _Average.apply(outputs[0], ctx.sum_over_ranks, ctx.scale), None, None  # type: ignore[no-untyped-call]


def average_with_graph(parameter: torch.nn.Parameter, sum_over_ranks: SumOverRanks, scale: float) -> None:
    """`parameter.grad` is the sum over the ranks of theirs, times `scale`, and can be differentiated again.

    Ranks: all, parameter by parameter in one order; one without a gradient contributes zeros. All of them
    run the backward through the results too, in one order.

    Args:
        parameter: whose gradient.
        sum_over_ranks: makes a contiguous tensor the sum of all ranks' counterparts.
        scale: of the sum.
    """
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    with torch.enable_grad():
        parameter.grad = _Average.apply(gradient, sum_over_ranks, scale)  # type: ignore[no-untyped-call]
