"""What SyncBatchNorm's ranks tell each other: one row of bytes each, all of them on every rank.

A row is a header of integers (phase, count, intent) and then the values per channel. An all-gather, not an
all-reduce: the ranks then combine the same rows in the same order, along the tree, and get the same bits
whatever the backend does. A row of zeros is that of a rank with an empty batch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from samestep.errors import NormalizationError
from samestep.nn.moments import Moments, merge
from samestep.tree import tree_sum

__all__ = ["AllGather", "Exchange", "Intent", "Phase", "Rows", "row_bytes"]

AllGather = Callable[[Tensor], list[Tensor]]
_HEADER_BYTES = 3 * 8


class Phase(enum.IntEnum):
    """Where a rank is."""

    FOLLOWING = 0  # it has run out of data (join), and counts as an empty batch
    FORWARD = 1
    BACKWARD = 2


class Intent(enum.IntEnum):
    """What a rank will do about this forward's backward."""

    NEEDS_NOTHING = 0  # it takes part if another rank needs it
    NEEDS_GRADIENT = 1  # its input does
    NO_BACKWARD = 2  # it runs without gradients: the backward would wait for it in vain


def row_bytes(num_channels: int) -> int:
    """The most that a row takes."""
    return _HEADER_BYTES + 2 * 8 * num_channels


class Rows:
    """All ranks' rows of one exchange.

    Args:
        rows: in rank order.
        num_channels: how many of each of the two kinds of values they hold.
        dtype: of the values.
        device: where the result is wanted.
    """

    def __init__(
        self, rows: list[Tensor], num_channels: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        stop = _HEADER_BYTES + 2 * num_channels * dtype.itemsize
        self.num_channels = num_channels
        self._headers = [row[:_HEADER_BYTES].view(torch.int64).to(device) for row in rows]
        self._values = [row[_HEADER_BYTES:stop].view(dtype).to(device) for row in rows]

    @cached_property
    def headers(self) -> list[list[int]]:
        """(phase, count, intent) of each rank, as numbers; an accelerator is waited for."""
        found: list[list[int]] = torch.stack(self._headers).tolist()
        return found

    def moments(self) -> Moments:
        """Those of the whole batch, summed along the tree."""
        size = self.num_channels
        parts = [
            Moments(header[1], values[:size], values[size:])
            for header, values in zip(self._headers, self._values, strict=True)
        ]
        return tree_sum(parts, merge)

    def sums(self) -> tuple[Tensor, Tensor]:
        """Of both kinds of values, along the tree."""
        total = tree_sum(self._values, torch.add)
        return total[: self.num_channels], total[self.num_channels :]

    def ranks_that(self, intent: Intent) -> list[int]:
        """Those with this intent; an accelerator is waited for."""
        return [rank for rank, header in enumerate(self.headers) if header[2] == intent]


class Exchange:
    """The collectives of one forward and its backward.

    Ranks: all, in the same order as their other collectives.

    Args:
        all_gather: this rank's row -> all ranks' rows.
        wire: the device on which rows travel.
        device: that of the batch.
        dtype: of the values.
    """

    def __init__(
        self, all_gather: AllGather, *, wire: torch.device, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._all_gather = all_gather
        self._wire = wire
        self.device = device
        self.dtype = dtype

    def rows(
        self, phase: Phase, values: tuple[Tensor, Tensor], *, count: int = 0, intent: Intent | None = None
    ) -> Rows:
        """All ranks' rows, this rank's holding these facts."""
        header = torch.tensor([phase, count, intent or 0], device=self._wire)
        both = torch.cat(values).to(self._wire, self.dtype)
        mine = torch.cat([header.view(torch.uint8), both.view(torch.uint8)])
        rows = Rows(self._all_gather(mine), values[0].numel(), self.dtype, self.device)
        if self._wire.type == "cpu":  # elsewhere looking would make the processor wait for the device
            _check_phases(rows, phase)
        return rows


def _check_phases(rows: Rows, phase: Phase) -> None:
    others = [(r, header[0]) for r, header in enumerate(rows.headers) if header[0] not in (0, phase)]
    if others:
        rank, other = others[0]
        raise NormalizationError(
            f"a SyncBatchNorm is in its {phase.name.lower()} here and rank {rank} is in another one's "
            f"{Phase(other).name.lower()}: every rank must run the same layers in the same order"
        )
