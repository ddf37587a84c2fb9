"""What rides along with the gradients: small facts about each rank, summed by the last bucket's all-reduce.

- for every parameter, on how many virtual ranks it was used (nobody: its gradient stays None);
- how many items (tokens, rows) the micro-batches counted, for averages by weight;
- whether a rank gave up in the middle of its backward.

They are float32 or float64 sums. A count is cut in digits of 12 bits, so that its sum over up to 4096 ranks
is exact in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CARRIER_DTYPES", "Rides", "num_rides", "read_rides", "write_rides"]

CARRIER_DTYPES = (torch.float32, torch.float64)
_DIGIT_BITS = 12
_NUM_DIGITS = 4
MOST_ITEMS = 2 ** (_DIGIT_BITS * _NUM_DIGITS) - 1


@dataclass(frozen=True)
class Rides:
    """The facts, of one rank when written, summed over the ranks when read."""

    used: tuple[int, ...]  # per parameter
    items: int = 0
    abandoned: int = 0


def num_rides(num_parameters: int) -> int:
    """How many elements they take."""
    return num_parameters + _NUM_DIGITS + 1


def write_rides(tensor: Tensor, used: Sequence[int] | None, items: int, abandoned: bool) -> None:
    """`tensor` holds the facts of this rank. `used=None`: all parameters were, once."""
    tensor.fill_(1)
    num_parameters = tensor.numel() - _NUM_DIGITS - 1
    if used is not None:
        tensor[:num_parameters] = torch.tensor(used, dtype=tensor.dtype)
    tail = [items >> (_DIGIT_BITS * d) & (2**_DIGIT_BITS - 1) for d in range(_NUM_DIGITS)]
    tensor[num_parameters:] = torch.tensor([*tail, int(abandoned)], dtype=tensor.dtype)


def read_rides(tensor: Tensor) -> Rides:
    """The facts, summed over all ranks. On an accelerator this waits for it."""
    values = [int(value) for value in tensor.tolist()]
    num_parameters = len(values) - _NUM_DIGITS - 1
    digits = values[num_parameters : num_parameters + _NUM_DIGITS]
    items = sum(digit << (_DIGIT_BITS * d) for d, digit in enumerate(digits))
    return Rides(tuple(values[:num_parameters]), items, values[-1])
