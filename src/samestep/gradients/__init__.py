"""How gradients become the same on all ranks. Read ddp.py, then reducer.py."""

from samestep.gradients.ddp import DistributedDataParallel as DistributedDataParallel

__all__ = ["DistributedDataParallel"]
