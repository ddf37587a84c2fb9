"""The data: which samples each rank sees, in which order."""

from __future__ import annotations

from samestep.data.loader import DataLoader
from samestep.data.plan import LoaderMode
from samestep.data.sampler import DistributedSampler, Mode
from samestep.data.weighted import WeightedSampler

__all__ = ["DataLoader", "DistributedSampler", "LoaderMode", "Mode", "WeightedSampler"]
