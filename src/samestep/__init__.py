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
    from samestep.process_group import barrier as barrier
    from samestep.process_group import destroy_process_group as destroy_process_group
    from samestep.process_group import device as device
    from samestep.process_group import get_local_rank as get_local_rank
    from samestep.process_group import get_rank as get_rank
    from samestep.process_group import get_world_size as get_world_size
    from samestep.process_group import init_process_group as init_process_group
    from samestep.process_group import is_initialized as is_initialized
    from samestep.process_group import is_main as is_main
    from samestep.world import World as World
    from samestep.world import gather as gather

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
    "barrier": ("samestep.process_group", "barrier"),
    "checkpoint": ("samestep.checkpoint", None),
    "clip_grad_norm_": ("samestep.optim", "clip_grad_norm_"),
    "destroy_process_group": ("samestep.process_group", "destroy_process_group"),
    "device": ("samestep.process_group", "device"),
    "gather": ("samestep.world", "gather"),
    "get_local_rank": ("samestep.process_group", "get_local_rank"),
    "get_rank": ("samestep.process_group", "get_rank"),
    "get_world_size": ("samestep.process_group", "get_world_size"),
    "init_process_group": ("samestep.process_group", "init_process_group"),
    "is_initialized": ("samestep.process_group", "is_initialized"),
    "is_main": ("samestep.process_group", "is_main"),
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
