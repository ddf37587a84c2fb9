"""Optimizers of which each rank does its share. Read sharded.py, then shards.py."""

from samestep.optim.sharded import ShardedOptimizer as ShardedOptimizer

__all__ = ["ShardedOptimizer"]
