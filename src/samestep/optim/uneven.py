"""Uneven inputs: a rank that has run out of data still updates its slices, on torch's `Join`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook

from samestep import collectives
from samestep.optim.groups import NOT_OPTIONS

if TYPE_CHECKING:
    from samestep.optim.sharded import ShardedOptimizer

__all__ = ["UnevenSteps", "agree_on_options"]


class UnevenSteps(Joinable):
    """A mix-in of `ShardedOptimizer`: its part in a join block."""

    def join_hook(self: ShardedOptimizer, **kwargs: Any) -> JoinHook:  # type: ignore[misc]
        """What torch's `Join` runs on ranks without data."""
        return _StepWithoutData(self)

    @property
    def join_device(self: ShardedOptimizer) -> torch.device:  # type: ignore[misc]
        """The device of this rank."""
        device: torch.device = self._parameters()[0].device
        return device

    @property
    def join_process_group(self: ShardedOptimizer) -> dist.ProcessGroup:  # type: ignore[misc]
        """The ranks that join."""
        return self.process_group


class _StepWithoutData(JoinHook):
    """One optimizer step of the ranks that still have data, for one that has none."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Update this rank's slices with the gradients of the others."""
        optimizer = self._optimizer
        if optimizer._reducers and optimizer._count_synchronised() == optimizer._num_synchronised:
            return  # they accumulate, and do not step
        with torch.no_grad():
            optimizer._update(active=False)
        optimizer.zero_grad()


def agree_on_options(optimizer: ShardedOptimizer, *, active: bool) -> None:
    """All ranks use the options (learning rates above all) of the lowest one that still has data.

    Schedulers stand still where the script has left its loop.

    Ranks: all.
    """
    mine = [
        {key: value for key, value in group.items() if key not in NOT_OPTIONS and _is_plain(value)}
        for group in optimizer.param_groups
    ]
    everyones = collectives.exchange_json([active, mine], optimizer.process_group)
    chosen = next((options for is_active, options in everyones if is_active), mine)
    for group, options in zip(optimizer.param_groups, chosen, strict=True):
        group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in options.items()})


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
