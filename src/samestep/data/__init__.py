"""The data: which samples each rank sees, in which order."""

from __future__ import annotations

from samestep.data.sampler import DistributedSampler, Mode

__all__ = ["DistributedSampler", "Mode"]
