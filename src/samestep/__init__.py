"""samestep: data-parallel training in PyTorch, the same step on every process.

The public names are loaded on first use (PEP 562), so that `import samestep` and the command line do
not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from samestep import checkpoint as checkpoint
    from samestep import nn as nn
    from samestep.data import DataLoader as DataLoader
    from samestep.data import DistributedSampler as DistributedSampler
    from samestep.data import WeightedSampler as WeightedSampler
    from samestep.errors import Preempted as Preempted
    from samestep.gradients import DistributedDataParallel as DistributedDataParallel
    from samestep.nn import SyncBatchNorm as SyncBatchNorm
    from samestep.observe import progress as progress
    from samestep.optim import ShardedOptimizer as ShardedOptimizer
    from samestep.optim import clip_grad_norm_ as clip_grad_norm_
    from samestep.preemption import Preemption as Preemption
    from samestep.world import World as World
    from samestep.world import barrier as barrier
    from samestep.world import destroy_process_group as destroy_process_group
    from samestep.world import device as device
    from samestep.world import gather as gather
    from samestep.world import get_local_rank as get_local_rank
    from samestep.world import get_rank as get_rank
    from samestep.world import get_world_size as get_world_size
    from samestep.world import init_process_group as init_process_group
    from samestep.world import is_initialized as is_initialized
    from samestep.world import is_main as is_main

    DDP = DistributedDataParallel

_HOME_OF = {
    "DDP": ("samestep.gradients", "DistributedDataParallel"),
    "DataLoader": ("samestep.data", "DataLoader"),
    "DistributedDataParallel": ("samestep.gradients", "DistributedDataParallel"),
    "DistributedSampler": ("samestep.data", "DistributedSampler"),
    "ShardedOptimizer": ("samestep.optim", "ShardedOptimizer"),
    "WeightedSampler": ("samestep.data", "WeightedSampler"),
    "SyncBatchNorm": ("samestep.nn", "SyncBatchNorm"),
    "World": ("samestep.world", "World"),
    "barrier": ("samestep.world", "barrier"),
    "checkpoint": ("samestep.checkpoint", None),
    "clip_grad_norm_": ("samestep.optim", "clip_grad_norm_"),
    "destroy_process_group": ("samestep.world", "destroy_process_group"),
    "device": ("samestep.world", "device"),
    "gather": ("samestep.world", "gather"),
    "get_local_rank": ("samestep.world", "get_local_rank"),
    "get_rank": ("samestep.world", "get_rank"),
    "get_world_size": ("samestep.world", "get_world_size"),
    "init_process_group": ("samestep.world", "init_process_group"),
    "is_initialized": ("samestep.world", "is_initialized"),
    "is_main": ("samestep.world", "is_main"),
    "nn": ("samestep.nn", None),
    "progress": ("samestep.observe", "progress"),
    "Preempted": ("samestep.errors", "Preempted"),
    "Preemption": ("samestep.preemption", "Preemption"),
}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    try:
        module_name, attribute = _HOME_OF[name]
    except KeyError:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}") from None
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
