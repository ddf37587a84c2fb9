"""How the ranks' tensors become one: the operation, and the tree along which it is applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from samestep.errors import CollectiveError
from samestep.tree import Span, halves

__all__ = ["Reduction", "op_name", "premultiplier", "reduction"]

_OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
Step = tuple[int, int, int]


class Reduction:
    """One operation over the tensors of `num_ranks` ranks, of one dtype.

    Floats of two bytes are added as torch adds them: in float32, rounded after each addition.
    """

    def __init__(self, name: str, dtype: torch.dtype, num_ranks: int) -> None:
        self.name = name
        self._operator = _OPERATORS[name]
        self._divisor = num_ranks if name == "AVG" else None
        self._rounding = None if dtype.is_floating_point or dtype.is_complex else "trunc"
        self._steps, self.num_scratch = _steps(num_ranks)
        self._try(dtype)

    def into(
        self, out: torch.Tensor, operands: Sequence[torch.Tensor], scratch: Sequence[torch.Tensor] = ()
    ) -> None:
        """`out` becomes the reduction of `operands`, one per rank, in rank order.

        Memory: `out` may be one of `operands`. `scratch` holds `num_scratch` more tensors of their shape.
        """
        if len(operands) == 2:
            self._operator(operands[0], operands[1], out=out)
        elif len(operands) == 1:
            out.copy_(operands[0])
        else:
            tensors = (*operands, *scratch, out)
            for left, right, target in self._steps:
                self._operator(tensors[left], tensors[right], out=tensors[target])
        if self._divisor is not None:
            torch.div(out, self._divisor, rounding_mode=self._rounding, out=out)

    def _try(self, dtype: torch.dtype) -> None:
        """Fail before anything is sent if torch cannot do this."""
        one = torch.zeros(1, dtype=dtype)
        try:
            self.into(one, [one, one])
        except (RuntimeError, NotImplementedError) as error:
            raise CollectiveError(f"torch cannot compute {self.name} of {dtype}: {error}") from None


@lru_cache
def _steps(num_ranks: int) -> tuple[list[Step], int]:
    """The additions of the tree as (left, right, target), and how many scratch tensors they take.

    Operands are numbered 0..num_ranks-1, scratch tensors from num_ranks, the result is -1. The result is
    written last, and by one step only: so it may share the memory of an operand.
    """
    steps: list[Step] = []
    most = 0

    def visit(node: Span, depth: int, target: int) -> int:
        nonlocal most
        children = halves(node)
        if children is None:
            return node.start
        left = visit(children[0], depth, num_ranks + depth)
        held = depth + (left >= num_ranks)
        right = visit(children[1], held, num_ranks + held)
        most = max(most, held + (right >= num_ranks))
        steps.append((left, right, target))
        return target

    visit(Span(0, num_ranks), 0, -1)
    return steps, most


@lru_cache(maxsize=256)
def reduction(name: str, dtype: torch.dtype, num_ranks: int) -> Reduction:
    """The `Reduction` of that name.

    Raises:
        CollectiveError: torch does not know the operation for this dtype.
    """
    return Reduction(name, dtype, num_ranks)


def op_name(op: Any) -> str:
    """The name of a reduce operation, "SUM" for example."""
    return str(getattr(op, "op", op)).rpartition(".")[2]


def premultiplier(op: Any) -> Any:
    """The factor of a PREMUL_SUM (a number or a tensor); None for other operations."""
    kind = getattr(op, "op", op)
    if kind != dist.ReduceOp.PREMUL_SUM:
        return None
    return op.__getstate__()[1]
