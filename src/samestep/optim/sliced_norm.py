"""Gradient clipping where each rank has only its slices of the gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep import collectives
from samestep.errors import GradientError
from samestep.gradients.sliced import SlicedGradient
from samestep.optim.clip import clip_grad_norm_
from samestep.virtual import virtual_ranks

__all__ = ["clip_gradients"]


@torch.no_grad()
def clip_gradients(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    group: dist.ProcessGroup,
    *,
    error_if_nonfinite: bool,
) -> Tensor:
    """The norm of all gradients, which are scaled down so that it is `max_norm` at most.

    Ranks: all.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    sliced = [g for g in gradients if isinstance(g, SlicedGradient)]
    if not sliced:
        return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
    if virtual_ranks(group).is_fixed:
        raise GradientError(
            "a norm summed over slices depends on the number of processes, and World(virtual_size=...) "
            "promises that nothing does: make the optimizer with stage=1 to clip"
        )
    whole = [g for g in gradients if not isinstance(g, SlicedGradient)]
    parts = [g.part for g in sliced]
    total = _norm(parts, norm_type, sliced[0].device)
    is_max = norm_type == float("inf")
    if not is_max:
        total = total**norm_type
    collectives.all_reduce(total, group, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM).wait()
    if not is_max:
        total = total ** (1.0 / norm_type)
    if whole:  # the same on all ranks
        both = torch.stack([total, _norm(whole, norm_type, total.device)])
        total = torch.linalg.vector_norm(both, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"The total norm of order {norm_type} for gradients is non-finite: {total.item()}")
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in (*parts, *whole):
        gradient.mul_(factor.to(gradient.dtype))
    return total.to(sliced[0].dtype)


def _norm(tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    norms = [torch.linalg.vector_norm(t, norm_type, dtype=torch.float64) for t in tensors if t.numel()]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    norm: Tensor = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), norm_type)
    return norm
