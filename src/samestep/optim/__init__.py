"""Optimizers of which each rank does its share. Read sharded.py, then shards.py."""

from samestep.optim.clip import clip_grad_norm_ as clip_grad_norm_
from samestep.optim.sharded import ShardedOptimizer as ShardedOptimizer

__all__ = ["ShardedOptimizer", "clip_grad_norm_"]
