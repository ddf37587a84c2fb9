"""Uneven inputs: ranks that have run out of data take part in what the others still reduce.

Built on torch's `Join`, so that other joinables (ZeroRedundancyOptimizer, ...) may share one block. Inside
of it each training forward announces itself: who still has data, who will synchronise the backward, and
whether a rank has raised; the others answer from their `main_hook`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from samestep import collectives
from samestep.errors import GradientError

if TYPE_CHECKING:
    from samestep.gradients.ddp import DistributedDataParallel

__all__ = ["Announcement", "JoinBlock", "ReplicaJoinHook", "announce"]


@dataclass(frozen=True)
class Announcement:
    """What the ranks said at the beginning of one step inside of a join block."""

    num_active: int  # ranks that still have data
    num_synchronising: int  # of those, the ones that will synchronise this backward
    num_raised: int  # ranks that left the block with an exception
    first_active: int  # the lowest rank that still has data


def announce(
    model: DistributedDataParallel, *, active: bool, synchronise: bool = False, raised: bool = False
) -> Announcement:
    """What all ranks announce for this step.

    Ranks: all: active ones from forward, the others from their join hook.

    Raises:
        GradientError: another rank has raised inside of the block, or the ranks disagree about whether
            this backward is synchronised.
    """
    group = model.process_group
    size, rank = group.size(), group.rank()
    facts = torch.zeros(size, 3, dtype=torch.int64, device=collectives.device_of(group))
    facts[rank] = torch.tensor([active, synchronise, raised])
    collectives.all_reduce(facts, group).wait()
    rows = facts.tolist()
    if raised:
        return Announcement(0, 0, 1, 0)
    others = [r for r, row in enumerate(rows) if row[2]]
    if others:
        raise GradientError(f"rank {others[0]} raised inside of join(); its own error says why")
    actives = [r for r, row in enumerate(rows) if row[0]]
    syncing = [r for r in actives if rows[r][1]]
    if syncing and len(syncing) != len(actives):
        raise GradientError(
            f"inside of join(), ranks {syncing} synchronise this step and the other active ones do not: "
            "use no_sync() on all of them or on none"
        )
    return Announcement(len(actives), len(syncing), 0, actives[0] if actives else 0)


class ReplicaJoinHook(JoinHook):
    """What a rank without data does while the others go on."""

    def __init__(self, model: DistributedDataParallel, *, divide_by_initial_world_size: bool) -> None:
        self._model = model
        model._join_used = True
        model._join_divides_by_initial = divide_by_initial_world_size

    def main_hook(self) -> None:
        """One step of the others: buffers, and gradients if they synchronise them."""
        model = self._model
        model._promised = False
        facts = announce(model, active=False)
        if model.training:
            model._buffer_sync.before_forward(src=facts.first_active)
        if facts.num_synchronising:
            model._set_join_divisor(facts.num_active)
            model._reducer.stand_by()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All hold the parameters and buffers of the rank that had data longest."""
        model = self._model
        group = model.process_group
        last = torch.tensor([group.rank() if is_last_joiner else -1], device=collectives.device_of(group))
        collectives.all_reduce(last, group, op=torch.distributed.ReduceOp.MAX).wait()
        model._authoritative_rank = int(last.item())  # torch's name
        model._sync_states(src=model._authoritative_rank, buffers=model.forward_sync_buffers)
        model._leave_join()


class JoinBlock(Join):
    """torch's `Join`, which in addition ends for all when a rank raises inside, and leaves nothing behind."""

    def __init__(self, model: DistributedDataParallel, **options: Any) -> None:
        self._model = model
        super().__init__([model], **options)

    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        model = self._model
        try:
            if self._enable and value is not None:
                _tell_the_others(model, value)
            super().__exit__(type, value, traceback)
        finally:
            model._join_config = _JoinConfig.construct_disabled_join_config()
            model._leave_join()


def _tell_the_others(model: DistributedDataParallel, error: BaseException) -> None:
    """The other ranks, which wait for this one in their next step, learn that it raised."""
    if isinstance(error, GradientError):
        return  # either all ranks have it, or it says that collectives no longer match
    if not isinstance(error, Exception):
        return  # Ctrl-C and the like: the process goes, and its sockets with it
    if model._reducer.settle():
        return  # it raised inside of a backward, and the others know by now
    if model._promised:
        model._promised = False
        model._reducer.give_up()  # before the backward that the others are in
        return
    Join.notify_join_context(model)
    announce(model, active=False, raised=True)
