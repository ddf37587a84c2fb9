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
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from samestep import collectives
from samestep.errors import GradientError
from samestep.gradients.rounds import CollectiveLayer, Rounds

if TYPE_CHECKING:
    from samestep.gradients.ddp import DistributedDataParallel

__all__ = ["Announcement", "JoinBlock", "ReplicaJoinHook", "UnevenInputs", "announce"]


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
        rounds = model._rounds()
        facts = announce(model, active=False)
        if model.training:
            model._buffer_sync.before_forward(src=facts.first_active)
        if rounds is not None:
            rounds.follow()
        if facts.num_synchronising:
            model._set_join_divisor(facts.num_active)
            model._reducer.stand_by()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All hold the parameters and buffers of the rank that had data longest."""
        model = self._model
        group = model.process_group
        last = torch.tensor([group.rank() if is_last_joiner else -1], device=collectives.device_of(group))
        collectives.all_reduce(last, group, op=dist.ReduceOp.MAX).wait()
        model._authoritative_rank = int(last.item())  # torch's name
        model._sync_states(src=model._authoritative_rank, buffers=model.forward_sync_buffers)
        model._leave_join()


class JoinBlock(Join):
    """torch's `Join`, which in addition ends for all when a rank raises inside, and leaves nothing behind."""

    def __init__(self, model: DistributedDataParallel, **options: Any) -> None:
        self._model = model
        model._join_block_is_ours = True
        found = [reference() for reference in model._reducer.sharded_by]
        # Sharded optimizers of the model step without data as well, after the model's own hook.
        self._optimizers = list({id(o): o for o in found if o is not None}.values())
        super().__init__([model, *self._optimizers], **options)

    def __enter__(self) -> None:
        if self._enable:
            try:
                self._model._rounds()
            except GradientError:
                self._leave()
                raise

    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        model = self._model
        try:
            rounds = model._reducer.rounds
            if self._enable and value is not None:
                _tell_the_others(model, value)
            elif rounds is not None:
                rounds.end_step()
            super().__exit__(type, value, traceback)
        finally:
            if rounds is not None and rounds.is_void:
                model._reducer.forget()
            self._leave()

    def _leave(self) -> None:
        model = self._model
        model._join_block_is_ours = False
        for joinable in (model, *self._optimizers):
            joinable._join_config = _JoinConfig.construct_disabled_join_config()
        model._leave_join()


def _tell_the_others(model: DistributedDataParallel, error: BaseException) -> None:
    """The other ranks, which wait for this one in their next step, learn that it raised."""
    rounds = model._reducer.rounds
    if rounds is not None and rounds.is_open and isinstance(error, Exception):
        model._promised = False
        rounds.give_up()
        return
    if isinstance(error, GradientError) or (rounds is not None and rounds.is_void):
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


class UnevenInputs(Joinable):
    """A mix-in of `DistributedDataParallel`: its part in a join block."""

    def __init__(self) -> None:
        super().__init__()
        self._join_divides_by_initial = True
        self._promised = False  # inside of join(): the others wait for this rank's next backward
        self._join_block_is_ours = False  # the block, which torch's `Join` may have made too

    def join(  # type: ignore[misc]
        self: DistributedDataParallel,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> JoinBlock:
        """A block inside of which ranks may run different numbers of batches.

        Ranks: all enter and leave it. One that raises inside ends the block on all.

        Args:
            divide_by_initial_world_size: gradients are divided by the number of all ranks, else by the
                number of those that still have data.
            enable: False makes the block do nothing.
            throw_on_early_termination: raise on all ranks when the first one runs out of data.
        """
        if enable and self._reducer.virtual.is_fixed:
            raise GradientError(
                "join() is for ranks with different numbers of batches, and with World(virtual_size=...) "
                "every virtual rank has a batch in every step: take batches from samestep's loader"
            )
        return JoinBlock(
            self,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self: DistributedDataParallel, **kwargs: Any) -> JoinHook:  # type: ignore[misc]
        """What torch's `Join` runs on ranks without data."""
        divide = kwargs.get("divide_by_initial_world_size", True)
        return ReplicaJoinHook(self, divide_by_initial_world_size=divide)

    @property
    def join_device(self: DistributedDataParallel) -> torch.device:  # type: ignore[misc]
        """The device of this rank."""
        return self.device

    @property
    def join_process_group(self: DistributedDataParallel) -> dist.ProcessGroup:  # type: ignore[misc]
        """The ranks that join."""
        return self.process_group

    def _announce_step(self: DistributedDataParallel) -> int:  # type: ignore[misc]
        early = None
        rounds = self._rounds()
        if rounds is not None:
            rounds.end_step()
        try:
            Join.notify_join_context(self)
        except RuntimeError as error:  # of throw_on_early_termination, on all ranks alike
            early = str(error)
        if early is not None:
            raise GradientError(early)  # here, so that it keeps no frames of torch's, nor the wrapper in them
        facts = announce(self, active=True, synchronise=self.require_backward_grad_sync)
        self._promised = self.require_backward_grad_sync
        self._set_join_divisor(facts.num_active)
        if rounds is not None:
            rounds.open()
        return facts.first_active

    def _rounds(self: DistributedDataParallel) -> Rounds | None:  # type: ignore[misc]
        """Those of the block; None if no layer of the module communicates by itself."""
        reducer = self._reducer
        if reducer.rounds is None and self.process_group.size() > 1:
            named = self.module.named_modules()
            layers = {name: layer for name, layer in named if isinstance(layer, CollectiveLayer)}
            if layers:
                reducer.rounds = Rounds(layers, self.process_group, self.device)
                # In torch's block nothing of ours runs when a rank leaves: no step may be open by then.
                reducer.rounds.closes_early = not self._join_block_is_ours
        return reducer.rounds

    def _set_join_divisor(self: DistributedDataParallel, num_active: int) -> None:  # type: ignore[misc]
        size = self.process_group.size()
        self._reducer.divisor = size if self._join_divides_by_initial else num_active

    def _leave_join(self: DistributedDataParallel) -> None:  # type: ignore[misc]
        if self._reducer.rounds is not None:
            self._reducer.rounds.close()
            self._reducer.rounds = None
        self._reducer.divisor = self.process_group.size()
