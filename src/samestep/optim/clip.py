"""Clipping by the norm of the gradients, whose sum does not depend on buckets or processes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from samestep.errors import GradientError
from samestep.gradients.sliced import SlicedGradient
from samestep.reduction import tree_sum_of

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of all gradients as one vector; they are scaled down so that it is `max_norm` at most.

    As torch's function of this name, but each parameter's share is added in float64 along the tree, in the
    order of `parameters`: the norm depends on the gradients alone. They are the same on all ranks, so
    nothing is communicated.

    Ranks: any; all that are to stay the same, with equal arguments.

    Args:
        parameters: whose gradients, in a fixed order; those without one are passed over.
        max_norm: the largest norm to be left.
        norm_type: of the p-norm; inf for the largest absolute value.
        error_if_nonfinite: raise instead of scaling by nan or 0.
        foreach: ignored; torch has it.

    Returns:
        The norm before scaling, in the gradients' dtype.

    Raises:
        RuntimeError: the norm is not finite, and `error_if_nonfinite`.
        GradientError: this rank has only slices of the gradients (`ShardedOptimizer` at stage 2).
    """
    gradients = [p.grad for p in _listed(parameters) if p.grad is not None]
    if any(isinstance(gradient, SlicedGradient) for gradient in gradients):
        raise GradientError(
            "this rank has only its slices of the gradients (stage=2): call optimizer.clip_grad_norm_()"
        )
    if not gradients:
        return torch.tensor(0.0)
    device, dtype = gradients[0].device, gradients[0].dtype
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64).to(device) for g in dense]
    shares = torch.stack(norms)
    if norm_type == float("inf"):
        total = shares.max()
    else:
        total = tree_sum_of(shares**norm_type) ** (1.0 / norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite ({total.item()}), so they "
            "cannot be clipped"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(device=gradient.device, dtype=gradient.dtype))
    return total.to(dtype)


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
