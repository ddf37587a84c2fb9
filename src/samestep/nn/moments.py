"""Count, mean and spread of each channel, and how those of two batches become those of both. Pure.

Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances"
(1979): squares are summed around each part's own mean, so that nothing cancels when the mean is large.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Moments",
    "channel_sums",
    "measure",
    "merge",
    "statistics_dtype",
    "view_of_channels",
    "wide_dtype",
]

_HAVE_FLOAT64 = ("cpu", "cuda")  # types of devices; others may lack it


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which a batch of `dtype` is measured: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def wide_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which ranks' statistics are combined: float64 where the device has it."""
    return torch.float64 if device.type in _HAVE_FLOAT64 else statistics_dtype(dtype)


@dataclass(frozen=True)
class Moments:
    """What is known of the values that each channel has in some batch.

    Shapes: `count` (), int64; `mean` and `square_sum` (C,), of one floating dtype.
    """

    count: Tensor  # values per channel: an integer, exact whatever its size
    mean: Tensor  # 0 of an empty batch
    square_sum: Tensor  # of the distances to the mean

    @property
    def variance(self) -> Tensor:
        """The biased one, which normalises; 0 of an empty batch."""
        return self.square_sum / self.count.clamp(min=1).to(self.mean.dtype)

    @property
    def unbiased_variance(self) -> Tensor:
        """The one that running statistics keep."""
        return self.square_sum / (self.count - 1).clamp(min=1).to(self.mean.dtype)


def measure(batch: Tensor) -> tuple[int, Tensor, Tensor]:
    """(values per channel, mean, square sum) of a batch (N, C, ...), both in its `wide_dtype`.

    In two passes, the second of which corrects the first: the mean that float32 can hold is off by up to
    half of its last digit, and so is the centre that squares are summed around.
    """
    channels = batch.size(1)
    count = batch.numel() // channels
    wide = wide_dtype(batch.dtype, batch.device)
    if count == 0:
        nothing = torch.zeros(channels, dtype=wide, device=batch.device)
        return 0, nothing, nothing
    values = batch.to(statistics_dtype(batch.dtype))
    centre = channel_sums(values) / count
    centred = values - view_of_channels(centre, batch)
    off = channel_sums(centred).to(wide) / count
    square_sum = channel_sums(centred.square_()).to(wide) - off.square() * count
    return count, centre.to(wide) + off, square_sum.clamp(min=0)


def merge(one: Moments, two: Moments) -> Moments:
    """The moments of both batches together."""
    count = one.count + two.count
    dtype = one.mean.dtype
    share = two.count.to(dtype) / count.clamp(min=1).to(dtype)
    apart = two.mean - one.mean
    between = apart * apart * (share * one.count.to(dtype))
    return Moments(count, one.mean + apart * share, one.square_sum + two.square_sum + between)


def channel_sums(values: Tensor) -> Tensor:
    """(N, C, ...) -> (C,): the sum over all but the channels."""
    return values.sum([0, *range(2, values.dim())])


def view_of_channels(per_channel: Tensor, batch: Tensor) -> Tensor:
    """(C,) -> (1, C, 1, ...), which broadcasts over `batch` (N, C, ...)."""
    return per_channel.view(1, -1, *[1] * (batch.dim() - 2))
