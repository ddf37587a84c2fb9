"""Batch normalisation with statistics of the global batch, as autograd sees it.

With x a value, n the values of its channel on all ranks, m and v their mean and variance:

    y = (x - m) / sqrt(v + eps) * weight + bias

Both m and v depend on every x of every rank. So the gradient by x holds two sums over all ranks, of the
gradients dy and of dy * (x - m); those by weight and bias are this rank's part, as in any other layer.

    dx = weight / sqrt(v + eps) * (dy - sum(dy) / n - (x - m) / (v + eps) * sum(dy * (x - m)) / n)

Source: Ioffe and Szegedy, "Batch Normalization" (2015), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from samestep.errors import NormalizationError
from samestep.nn.exchange import Exchange, Intent, Phase
from samestep.nn.moments import channel_sums, statistics_dtype, view_of_channels

__all__ = ["Backward", "intent_of", "normalize"]


@dataclass(frozen=True)
class Backward:
    """What is agreed about a forward's backward."""

    exchange: Exchange
    anyone: bool  # whether the input of any rank needs a gradient: then all take part
    absent: tuple[int, ...]  # ranks that will not be there, where that is known


def normalize(
    batch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    statistics: tuple[Tensor, Tensor, Tensor],
    eps: float,
    backward: Backward,
) -> Tensor:
    """`batch` normalised with `statistics`: (count, mean, biased variance) of the global batch."""
    anchor = None
    needy = any(t is not None and t.requires_grad for t in (batch, weight, bias))
    if backward.anyone and not needy and torch.is_grad_enabled():
        # Another rank's backward has a collective here. This makes it one of this rank's backward too.
        anchor = torch.zeros((), device=batch.device, requires_grad=True)
    apply: Callable[..., Tensor] = _Normalize.apply
    return apply(batch, weight, bias, anchor, *statistics, eps, backward)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        batch: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        anchor: Tensor | None,
        count: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        backward: Backward,
    ) -> Tensor:
        ctx.save_for_backward(batch, weight, count, mean, variance)
        ctx.eps, ctx.backward_of = eps, backward
        ctx.bias_dtype = None if bias is None else bias.dtype
        dtype = statistics_dtype(batch.dtype)
        return functional.batch_norm(
            batch, mean.to(dtype), variance.to(dtype), _to(weight, dtype), _to(bias, dtype), False, 0.0, eps
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        batch, weight, count, mean, variance = ctx.saved_tensors
        agreed: Backward = ctx.backward_of
        dtype = statistics_dtype(batch.dtype)
        needs_batch, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if agreed.anyone and agreed.absent:
            raise NormalizationError(
                f"rank {agreed.absent[0]} ran this forward of a SyncBatchNorm in training mode without "
                "gradients and takes no part in its backward: use eval(), or gradients on all ranks alike"
            )
        gradient = gradient.to(dtype)
        centred = batch.to(dtype) - view_of_channels(mean.to(dtype), batch)
        sums = channel_sums(gradient), channel_sums(centred * gradient)
        inverse = torch.rsqrt(variance + ctx.eps)
        by_weight = (sums[1] * inverse).to(weight.dtype) if needs_weight else None
        by_bias = sums[0].to(ctx.bias_dtype) if needs_bias else None
        by_batch = None
        if agreed.anyone:
            totals = agreed.exchange.rows(Phase.BACKWARD, sums).sums()
            if needs_batch:
                by_batch = _by_batch(centred, gradient, totals, count, inverse, weight).to(batch.dtype)
        return by_batch, by_weight, by_bias, None, None, None, None, None, None


def _by_batch(
    centred: Tensor,
    gradient: Tensor,
    totals: tuple[Tensor, Tensor],
    count: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
) -> Tensor:
    """The gradient by the batch, written over `centred`."""
    num = count.clamp(min=1).to(inverse.dtype)
    scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
    slope = scale * inverse.square() * (totals[1] / num)
    offset = scale * (totals[0] / num)

    def of_channels(values: Tensor) -> Tensor:
        return view_of_channels(values.to(centred.dtype), centred)

    centred.mul_(of_channels(-slope)).sub_(of_channels(offset))
    return centred.addcmul_(gradient, of_channels(scale))


def intent_of(batch: Tensor) -> Intent:
    """What this rank will do about the backward of a forward over `batch`."""
    if not torch.is_grad_enabled():
        return Intent.NO_BACKWARD
    return Intent.NEEDS_GRADIENT if batch.requires_grad else Intent.NEEDS_NOTHING


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
