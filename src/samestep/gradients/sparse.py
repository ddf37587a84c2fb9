"""Sparse gradients (embeddings'): rows are gathered from all ranks and summed, no buffer of the full size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from samestep import collectives

__all__ = ["SparseGradients"]

_NO_GRADIENT = -1


class SparseGradients:
    """The sparse gradients of `params`, of which those of several virtual ranks may be kept.

    All rows are kept until they are summed: sums of rows could be longer than any of them.

    Ranks: all make one, with the same parameters.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
        self._params = params
        self._group = group
        self._kept: list[list[Tensor]] = [[] for _ in params]

    def reset(self) -> None:
        """What was kept is dropped."""
        for kept in self._kept:
            kept.clear()

    def keep(self, weight: float) -> None:
        """The gradients, times `weight`, wait for those of the virtual ranks to come; none are left."""
        for param, kept in zip(self._params, self._kept, strict=True):
            if param.grad is not None:
                kept.append(_weighted(param.grad, weight))
                param.grad = None

    def reduce(self, scale: float, *, weight: float = 1.0, contribute: bool = True) -> None:
        """Each parameter has the sum over the ranks of its sparse gradients times `scale`, coalesced.

        A parameter that has a gradient on no rank keeps None. Rows are summed in the order of virtual ranks.

        Ranks: all. One that does not `contribute` adds nothing.

        Args:
            scale: of the sums.
            weight: of the gradients at hand, as for `keep`.
            contribute: False: this rank adds nothing.
        """
        if contribute:
            self.keep(weight)
        mine = [_joined(kept) if kept and contribute else None for kept in self._kept]
        counts = _exchange_counts([_NO_GRADIENT if g is None else g._nnz() for g in mine], self._group)
        for i, param in enumerate(self._params):
            per_rank = [row[i] for row in counts]
            if all(n == _NO_GRADIENT for n in per_rank):
                continue
            grad = _gather_rows(param, mine[i], [max(n, 0) for n in per_rank], self._group)
            param.grad = None  # it may have been dense: another layout cannot be assigned over it
            param.grad = grad * scale if scale != 1.0 else grad
        self.reset()


def _weighted(grad: Tensor, weight: float) -> Tensor:
    grad = _as_sparse(grad)
    return grad if weight == 1.0 else grad * weight


def _joined(grads: Sequence[Tensor]) -> Tensor:
    """All rows of `grads`, one after the other: not coalesced."""
    if len(grads) == 1:
        return grads[0]
    indices = torch.cat([grad._indices() for grad in grads], 1)
    values = torch.cat([grad._values() for grad in grads])
    return torch.sparse_coo_tensor(indices, values, grads[0].shape, check_invariants=False)


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
        indices[: grad._nnz()] = grad._indices()[0]
        values[: grad._nnz()] = grad._values()
    all_indices = collectives.all_gather(indices, group)
    all_values = collectives.all_gather(values, group)
    joined_indices = torch.cat([t[:n] for t, n in zip(all_indices, counts, strict=True)])
    joined_values = torch.cat([t[:n] for t, n in zip(all_values, counts, strict=True)])
    return torch.sparse_coo_tensor(
        joined_indices.unsqueeze(0), joined_values, param.shape, check_invariants=False
    ).coalesce()
