"""The reducer: hooks put gradients in buckets, full buckets are reduced while backward goes on.

One gradient, from hook to optimizer:

    autograd adds to param.grad --post-accumulate hook--> `_on_gradient`: one more of its bucket's slots is
    complete --all are--> queue.py: buckets go out in the agreed order, each filled with its parameters'
    gradients and all-reduced (or given to the user's hook)
    --end of the same backward--> `_finish`: the rest goes out, all are waited for, and param.grad, a view
    of the bucket, is the average.

[Note: Used and unused]
A bucket with an unused parameter goes out at the end of backward, with zeros for it. Which parameters were
used on no rank at all is known from the rides (rides.py), which travel in the last bucket: those keep
the gradient that they had, None as a rule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep import collectives
from samestep.errors import GradientError
from samestep.gradients import refusals
from samestep.gradients.backward import BackwardWatch, reaches_any
from samestep.gradients.bucket import Bucket, Slot, make_buckets
from samestep.gradients.buckets import BucketPlan
from samestep.gradients.clock import Clock
from samestep.gradients.higher_order import average_with_graph
from samestep.gradients.hooks import CommunicationHook
from samestep.gradients.leaves import Leaves
from samestep.gradients.meeting import serial_number
from samestep.gradients.queue import BucketQueue
from samestep.gradients.rides import Rides, num_rides, read_rides, write_rides
from samestep.gradients.rounds import Rounds
from samestep.gradients.sliced import SlicedGradient
from samestep.gradients.sparse import SparseGradients
from samestep.gradients.turns import Role, Turns
from samestep.reduction import TreeSum
from samestep.virtual import virtual_ranks

__all__ = ["REDUCTIONS", "Reducer", "reducer_of"]

REDUCTIONS = ("mean", "sum", "weighted")
_current_task = torch._C._current_graph_task_id


class Reducer:
    """Keeps the gradients of `parameters` the same on all ranks of `group`; param.grad is their average.

    Ranks: all make one, over parameters that were compared before (replicas.py); each backward with
    `synchronise` on is a collective.

    Args:
        plan: which gradient travels in which bucket.
        parameters: those of the plan, in its order.
        group: the ranks.
        reduction: "mean", "sum", or "weighted" by the items counted with `count_items`.
        static_graph: promises that every backward fires the same hooks as the first one did.
        release_unused: ask the engine at the beginning of each backward which parameters it will not
            reach, and do not wait for them (torch's `find_unused_parameters`).
        deterministic: sum along the tree, over any backend. It is always so where the number of virtual
            ranks was asked for.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[torch.nn.Parameter],
        group: dist.ProcessGroup,
        *,
        reduction: str = "mean",
        static_graph: bool = False,
        release_unused: bool = False,
        deterministic: bool = False,
    ) -> None:
        self.plan = plan
        self.group = group
        self.synchronise = True
        self.static_graph = static_graph
        self.release_unused = release_unused
        self.reduction = reduction
        self.virtual = virtual = virtual_ranks(group)
        self.divisor = virtual.virtual_size  # of a mean; fewer where ranks have run out of data (join.py)
        self.num_backwards = 0  # synchronised ones
        self.sharded_by: list[Callable[[], Any]] = []  # weak references to sharded optimizers
        self.is_static = True  # every backward so far has fired the same hooks
        self.error: str | None = None  # a promise that was broken
        self.rounds: Rounds | None = None  # in a join block whose layers communicate too: buckets go last
        self.clock = Clock()
        self.on_synchronised: list[Callable[[], None]] = []  # called when the gradients are the same
        self.on_kept: list[Callable[[Turns], None]] = []  # called when a virtual rank's wait in the tree
        self.on_void: list[Callable[[], None]] = []  # called when the step's gradients have been dropped
        self.on_all_launched: list[Callable[[Turns], None]] = []  # called before the last ones are waited for
        self.num_used: tuple[int, ...] = (0,) * len(parameters)  # virtual ranks that used each, last time
        self._closed = False
        self._items = 0
        self._syncing = False  # the role of the running backward is REDUCE
        self._keep_graph = False
        self._usual_firings: list[int] | None = None  # per parameter, in the first backward
        self._num_since_plan = 0
        self._num_filled = 0
        self._serial = serial_number(group)

        self.slots = [
            Slot(i, info.name, param)
            for i, (info, param) in enumerate(zip(plan.parameters, parameters, strict=True))
        ]
        self.turns = Turns(virtual, self.slots)
        self._sparse = SparseGradients([self.slots[i].param for i in plan.sparse], group)
        self.tree = TreeSum(group, virtual) if deterministic or virtual.is_fixed else None
        rides = num_rides(len(self.slots))
        buckets = make_buckets(plan, self.slots, rides, group, self.tree.padded if self.tree else int)
        self._leaves = Leaves(buckets, virtual, self.tree)
        me = weakref.ref(self)  # hooks live as long as parameters do: they must not keep the reducer
        self.queue = BucketQueue(
            buckets,
            self._leaves,
            rides,
            group,
            facts=lambda: _alive(me)._facts(),
            clock=self.clock,
            where=lambda: _alive(me)._where(),
        )
        self.queue.on_all_launched = lambda: _alive(me)._all_launched()
        self._watch = BackwardWatch(
            [slot.node for slot in self.slots],
            begin=lambda: _alive(me)._begin(),
            end=lambda: _alive(me)._finish(),
            of_parameters=lambda: refusals.check_grad_of_parameters(_alive(me).synchronise),
        )
        self._nodes = frozenset(slot.node for slot in self.slots)
        for slot in self.slots:
            _retire_former_reducer(slot.param)
        self._handles = [
            slot.param.register_post_accumulate_grad_hook(_hook_for(me, slot.index)) for slot in self.slots
        ]

    def close(self) -> None:
        """Parameters are left alone from now on; their gradients stay where they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._closed = True

    def __del__(self) -> None:
        # [Note: Who holds whom] Nothing that outlives a wrapper holds its reducer, and the reducer holds no
        # wrapper: both go with the last reference, and a module can be wrapped again at once. Were it
        # left to the garbage collector, the old hooks would go on reducing until it runs.
        for slot in getattr(self, "slots", ()):
            slot.bucket = None  # buckets hold slots: a cycle, in which the buffers would stay
        if hasattr(self, "_handles"):
            self.close()

    def continue_from(self, before: Reducer) -> None:
        """Take over what `before`, which has another plan or other parameters, knows of this run."""
        self.synchronise, self.divisor, self.rounds = before.synchronise, before.divisor, before.rounds
        self.num_backwards, self.clock, self._items = before.num_backwards, before.clock, before._items
        self.queue.num_early = before.queue.num_early
        self.queue._clock = self.clock
        unsynchronised = {id(slot.param) for slot in before.slots if slot.used}
        for slot in self.slots:
            slot.used = id(slot.param) in unsynchronised

    # What the wrapper calls

    def watch_output(self, tensor: Tensor) -> None:
        """The backward through `tensor`, an output that requires a gradient, will be noticed."""
        if tensor.grad_fn is not None and not self._closed:
            reaches = reaches_any(tensor, self._nodes)
            tensor.register_hook(partial(_forward_to, weakref.ref(self._watch), reaches))

    def settle(self) -> bool:
        """If the last backward raised midway, the ranks are in step again and its gradients are gone.

        Ranks: those on which it raised, before their next backward; the others take part in `_finish`.

        Returns:
            Whether there was one, synchronised, so that the other ranks know by now.
        """
        if not self._watch.abandoned or _current_task() >= 0:
            return False
        return self._settle()

    def count_items(self, items: int) -> None:
        """The micro-batch at hand counted `items` items: its weight in the average."""
        refusals.check_items(self.reduction, items, self._items)
        self._items += items

    def set_hook(self, state: Any, hook: CommunicationHook) -> None:
        """Full buckets are given to `hook(state, bucket)` instead of being all-reduced."""
        if not self.virtual.is_single:
            raise refusals.needs_one_virtual_rank("a communication hook", self.virtual)
        self.queue.set_hook(state, hook)

    @property
    def running(self) -> bool:
        """Whether a backward is under way."""
        return self._watch.running

    def scatter(self, cuts: Mapping[int, Sequence[int]]) -> None:
        """Of the buckets numbered in `cuts` each rank gets the average of its own slice alone from now on.

        Their parameters' gradients are `SlicedGradient`s after a synchronised backward (sliced.py).

        Ranks: all, with equal cuts, between two backwards.
        """
        self.queue.scatter(cuts)
        rank = self.group.rank()
        for bucket in self.queue.buckets:
            if bucket.index not in cuts or not self.queue.is_scattered(bucket):
                continue
            first, last = cuts[bucket.index][rank], cuts[bucket.index][rank + 1]
            offset = 0
            for slot in bucket.slots:
                stop = offset + slot.param.numel()
                part = bucket.gradients[max(first, offset) : max(first, offset, min(last, stop))]
                assert slot.view is not None
                slot.sliced = SlicedGradient(slot.param, slot.name, slot.view, part, self.group)
                offset = stop

    @property
    def closed(self) -> bool:
        """Whether another reducer, or none, has taken its place."""
        return self._closed

    def synchronise_now(self) -> None:
        """What was accumulated without synchronising is averaged now, without a backward.

        Ranks: all. One that has accumulated nothing contributes nothing.
        """
        self.settle()
        if self.running:
            raise GradientError("sync_gradients() was called inside of a backward: call it after it")
        self._begin(force=True)
        self._finish(force=True)

    def stand_by(self) -> None:
        """Take part in a synchronised backward of the other ranks with zeros, whatever was accumulated.

        Ranks: those that have run out of data (join.py). They have no gradients before nor after it.
        """
        self._drop_gradients()
        self.synchronise_now()
        if not self.sharded_by:  # else the optimizer has its slice to update, and drops them
            self._drop_gradients()

    def give_up(self) -> None:
        """Take part in a synchronised backward of the other ranks by telling them that it is void.

        Ranks: those that raised after they had promised to take part (join.py).
        """
        self._begin(force=True)
        self._settle()

    def forget(self) -> None:
        """A backward that was under way is void, which all ranks know already."""
        self._syncing = False
        self._items = 0
        self._watch.forget()
        self.turns.role = Role.ACCUMULATE
        self._drop_gradients()
        self._forget_step()
        self._void()

    # One backward

    def _begin(self, *, force: bool = False) -> None:
        if self._watch.abandoned:
            self._settle()
        self._syncing = False
        try:
            role = self.turns.begin(synchronise=self.synchronise or force)
        except GradientError:
            self._forget_step()
            self._void()
            raise
        keep_graph = torch.is_grad_enabled() and not force  # backward(create_graph=True)
        if keep_graph and role is not Role.ACCUMULATE and not self.virtual.is_single:
            raise refusals.needs_one_virtual_rank("backward(create_graph=True)", self.virtual)
        if role is not Role.REDUCE:
            return
        self._syncing = True
        self.clock.backward_began()
        self._keep_graph = keep_graph
        self.queue.reset()
        self._num_filled = 0
        if self.reduction != "mean" and not force:
            refusals.check_fresh(self.slots, self.reduction)
        if self.release_unused and not force and self._usual_firings is not None:
            self._release_unused()

    def _release_unused(self) -> None:
        for slot in self.slots:
            if slot.bucket is not None and not torch._C._will_engine_execute_node(slot.node):
                slot.released = True
                self._one_more_complete(slot.bucket)

    def _on_gradient(self, slot: Slot) -> None:
        watch = self._watch
        if _current_task() != watch.task:
            watch.enter()
        slot.used = True
        bucket = slot.bucket
        if not self._syncing or bucket is None:
            return
        slot.firings += 1
        if watch.nested and not slot.nested:
            slot.nested = True
            # [Note: Firing more than once] A layer that several re-entrant checkpoints share fires once in
            # each of them. How often is known only at the end, unless it was promised to be constant.
            bucket.held = bucket.held or not self.static_graph
        if bucket.launched:
            raise refusals.late(slot, self.group.rank())
        if slot.firings == slot.expected and not slot.released:
            self._one_more_complete(bucket)

    def _one_more_complete(self, bucket: Bucket) -> None:
        bucket.waiting -= 1
        if bucket.waiting:
            return
        bucket.filled_at = self._num_filled
        self._num_filled += 1
        # The first backward shows how often each parameter fires: nothing goes out early in it.
        if self._usual_firings is not None and not self._keep_graph and self.rounds is None:
            self.queue.launch_ready(self._scale_before())

    def _finish(self, *, force: bool = False) -> None:
        if self.rounds is not None:
            self.rounds.backward_ended(synchronised=self._syncing)
        if self.turns.role is Role.KEEP:
            self._keep()
        if not self._syncing:
            return
        self.clock.backward_ended()
        try:
            if self._keep_graph:
                self._finish_with_graph()
            else:
                self._finish_in_buckets()
        finally:
            self._syncing = False
            self._items = 0
            self._forget_step()
        self.num_backwards += 1
        self._num_since_plan += 1
        self.clock.synchronised()
        self._learn(forced=force)
        for notify in self.on_synchronised:
            notify()

    def _keep(self) -> None:
        """A virtual rank of several has yielded its gradient, or a part of it: see turns.py, leaves.py."""
        self.turns.role = Role.ACCUMULATE  # this one is done
        self._leaves.keep(self._scale_before(), ends_virtual_rank=self.turns.ends_virtual_rank)
        self._sparse.keep(self._weight())
        self.turns.kept()
        for notify in self.on_kept:
            notify(self.turns)

    def _all_launched(self) -> None:
        for notify in self.on_all_launched:
            notify(self.turns)

    def _void(self) -> None:
        for notify in self.on_void:
            notify()

    def _forget_step(self) -> None:
        """What was kept of the step has been used, or is void."""
        self._leaves.reset()
        self._sparse.reset()
        self.turns.reset()
        for slot in self.slots:
            slot.used = False

    def _finish_in_buckets(self) -> None:
        rides = self.queue.complete(self._scale_before())
        self._reduce_sparse(contribute=True)
        if rides.abandoned:
            self._drop_gradients()
            self._void()
            raise refusals.abandoned(rides.abandoned, self.group.rank())
        self.num_used = rides.used
        factor = self._scale_after(rides)
        if factor != 1.0:
            for bucket in self.queue.buckets:
                bucket.gradients.mul_(factor)
        for slot, num_used in zip(self.slots, rides.used, strict=True):
            if num_used and slot.sliced is not None and self.queue.hook is None:
                slot.param.grad = slot.sliced
            elif num_used and not slot.used and slot.view is not None:
                slot.param.grad = slot.view

    def _finish_with_graph(self) -> None:
        """[Note: create_graph] No buckets: each average is a node of the graph, see higher_order.py."""
        alone = torch.zeros(num_rides(len(self.slots)), device=collectives.device_of(self.group))
        write_rides(alone, *self._facts(), abandoned=False)
        collectives.all_reduce(alone, self.group).wait()
        rides = read_rides(alone)
        scale = self._scale_before() * self._scale_after(rides)
        for slot, num_used in zip(self.slots, rides.used, strict=True):
            if num_used:
                average_with_graph(slot.param, self._sum_over_ranks, scale)

    def _sum_over_ranks(self, tensor: Tensor) -> None:
        flat = tensor.view(-1)
        if self.tree is not None:
            self.tree.total([flat], flat)
        else:
            collectives.all_reduce(flat, self.group).wait()

    def _learn(self, *, forced: bool) -> None:
        """From the backward just done: how often each parameter fires, and in what order buckets fill."""
        firings = [slot.firings for slot in self.slots]
        size = len(self.queue.buckets)
        if self.group.size() > 1 and size > 1 and _is_time_to_agree(self._num_since_plan):
            self.queue.agree_on_order()
        if forced or self._keep_graph:
            return
        if self._usual_firings is None:
            self._usual_firings = firings
            if self.static_graph:
                for slot in self.slots:
                    slot.expected = max(1, slot.firings)
        elif firings != self._usual_firings:
            self.is_static = False
            if self.static_graph:
                error = refusals.graph_changed(self.slots, self._usual_firings, firings)
                self.error = str(error)
                raise error

    def _settle(self) -> bool:
        syncing, self._syncing = self._syncing, False
        self._watch.forget()
        if self.turns.role is Role.KEEP:
            self._drop_gradients()  # the turn is void: another one's backward will say so
            self._void()
        self.turns.role = Role.ACCUMULATE
        if not syncing:
            return False
        if self.rounds is not None and self.rounds.is_open:
            self.forget()
            self.rounds.give_up()
            raise GradientError("the last backward raised inside of join(): leave the block")
        # The other ranks wait for the buckets that this one has not sent: they get zeros, and the word.
        self._drop_gradients()
        self._items = 0
        self.queue.complete(1.0, abandoned=True)
        self._reduce_sparse(contribute=False)
        self._forget_step()
        self._void()
        return True

    def _drop_gradients(self) -> None:
        for slot in self.slots:
            slot.param.grad = None
            slot.used = False

    # Scales and facts

    def _weight(self) -> float:
        return self.turns.weight if self.reduction == "mean" else 1.0

    def _scale_before(self) -> float:
        divisor = self.divisor if self.reduction == "mean" and self.queue.hook is None else 1
        return self._weight() / divisor

    def _scale_after(self, rides: Rides) -> float:
        # A hook divides by the number of ranks by itself, as torch's do.
        undone = float(self.virtual.virtual_size) if self.queue.hook is not None else 1.0
        if self.reduction == "mean":
            return undone / self.divisor if self.queue.hook is not None else 1.0
        if self.reduction == "sum":
            return undone
        if rides.items == 0:
            raise refusals.nothing_counted()
        return undone / rides.items

    def _facts(self) -> tuple[list[int], int]:
        return self.turns.num_used(), self._items

    def _where(self) -> str:
        return f"synchronised backward {self.num_backwards + 1} of model {self._serial}"

    def _reduce_sparse(self, *, contribute: bool) -> None:
        alone = self.group.size() == 1 and self.virtual.is_single and self._weight() == 1.0
        if self.plan.sparse and not alone:
            scale = 1.0 / self.divisor if self.reduction == "mean" else 1.0
            self._sparse.reduce(scale, weight=self._weight(), contribute=contribute)

    # Facts for the wrapper

    def plan_of_used(self) -> BucketPlan:
        """The plan without the parameters that the last backward used on no rank."""
        used = [tuple(i for i in members if self.num_used[i]) for members in self.plan.buckets]
        return replace(self.plan, buckets=tuple(members for members in used if members))

    @property
    def unused_bytes(self) -> int:
        """The size of the parameters that the last backward used on no rank."""
        pairs = zip(self.plan.parameters, self.num_used, strict=True)
        return sum(p.bytes for p, used in pairs if not used) if self.num_backwards else 0

    def statistics(self) -> dict[str, Any]:
        """What the reducer has done so far: counts, bytes, seconds, the order of launch."""
        return {
            "world_size": self.group.size(),
            "num_parameters": len(self.slots),
            "num_buckets": len(self.queue.buckets),
            "bucket_bytes": [self.plan.bucket_bytes(b.index) for b in self.queue.buckets],
            "launch_order": list(self.queue.order),
            "num_synchronised_backwards": self.num_backwards,
            "num_buckets_launched_early": self.queue.num_early,
            "backward_s": self.clock.sum_backward_ns / 1e9,
            "wait_s": self.clock.sum_wait_ns / 1e9,
        }


def _alive(reference: weakref.ref[Reducer]) -> Reducer:
    reducer = reference()
    assert reducer is not None, "a reducer's backward outlived it"
    return reducer


def _hook_for(reference: weakref.ref[Reducer], index: int) -> Callable[[Tensor], None]:
    def on_gradient(_param: Tensor) -> None:
        reducer = reference()
        if reducer is not None:
            reducer._on_gradient(reducer.slots[index])

    on_gradient.reducer = reference  # type: ignore[attr-defined]
    return on_gradient


def reducer_of(parameter: Tensor) -> Reducer | None:
    """The reducer that synchronises the gradients of `parameter`, if one does."""
    hooks: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for hook in list(hooks.values()):
        reference = getattr(hook, "reducer", None)
        if isinstance(reference, weakref.ref) and isinstance(reducer := reference(), Reducer):
            return reducer
    return None


def _retire_former_reducer(parameter: torch.nn.Parameter) -> None:
    """A module that is wrapped again is the new wrapper's alone, whoever still holds the old one."""
    former = reducer_of(parameter)
    if former is not None:
        former.close()


def _forward_to(reference: weakref.ref[BackwardWatch], reaches_parameters: bool, gradient: Tensor) -> None:
    watch = reference()
    if watch is not None:
        watch.on_output(reaches_parameters, gradient)


def _is_time_to_agree(num_backwards: int) -> bool:
    return num_backwards in (1, 10, 100) or num_backwards % 1000 == 0
