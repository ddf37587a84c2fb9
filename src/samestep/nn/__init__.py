"""Layers that see the whole global batch."""

from samestep.nn.batchnorm import BatchNorm, SyncBatchNorm

__all__ = ["BatchNorm", "SyncBatchNorm"]
