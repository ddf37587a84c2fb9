"""Sparse gradients (embeddings'): rows are gathered from all ranks and summed, no buffer of the full size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from samestep import collectives

__all__ = ["reduce_sparse"]

_NO_GRADIENT = -1


def reduce_sparse(
    params: Sequence[torch.nn.Parameter],
    scale: float,
    group: dist.ProcessGroup,
    *,
    contribute: bool = True,
) -> None:
    """Each of `params` has the sum over the ranks of its sparse gradient times `scale`, coalesced.

    A parameter that has a gradient on no rank keeps None. Rows are summed in the order of ranks.

    Ranks: all, with the same parameters. One that does not `contribute` adds nothing.
    """
    mine = [_as_sparse(p.grad) if p.grad is not None and contribute else None for p in params]
    counts = _exchange_counts([_NO_GRADIENT if g is None else g._nnz() for g in mine], group)
    for i, param in enumerate(params):
        per_rank = [row[i] for row in counts]
        if all(n == _NO_GRADIENT for n in per_rank):
            continue
        grad = _gather_rows(param, mine[i], [max(n, 0) for n in per_rank], group)
        param.grad = None  # it may have been dense: another layout cannot be assigned over it
        param.grad = grad * scale if scale != 1.0 else grad


def _as_sparse(grad: Tensor) -> Tensor:
    return grad.coalesce() if grad.is_sparse else grad.to_sparse(1).coalesce()


def _exchange_counts(mine: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    device = collectives.device_of(group)
    word = torch.tensor(mine, dtype=torch.int64, device=device)
    words = collectives.all_gather(word, group)
    return [[int(n) for n in row.tolist()] for row in words]


def _gather_rows(param: Tensor, grad: Tensor | None, counts: list[int], group: dist.ProcessGroup) -> Tensor:
    most = max(counts)
    # One sparse dimension is what every embedding makes; others are flattened to it by to_sparse(1).
    row_shape = param.shape[1:]
    indices = torch.zeros(most, dtype=torch.int64, device=param.device)
    values = torch.zeros((most, *row_shape), dtype=param.dtype, device=param.device)
    if grad is not None:
        indices[: grad._nnz()] = grad.indices()[0]
        values[: grad._nnz()] = grad.values()
    all_indices = collectives.all_gather(indices, group)
    all_values = collectives.all_gather(values, group)
    joined_indices = torch.cat([t[:n] for t, n in zip(all_indices, counts, strict=True)])
    joined_values = torch.cat([t[:n] for t, n in zip(all_values, counts, strict=True)])
    return torch.sparse_coo_tensor(
        joined_indices.unsqueeze(0), joined_values, param.shape, check_invariants=False
    ).coalesce()
