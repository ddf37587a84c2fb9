"""The reducer: hooks put gradients in buckets, full buckets are reduced while backward goes on.

One gradient, from hook to optimizer:

    autograd adds to param.grad --post-accumulate hook--> `_on_gradient`: one more of its bucket's slots is
    complete --all are--> `_launch_ready`: buckets go out in the agreed order: `Bucket.fill` puts
    param.grad in its place in the buffer, `_launch` starts the all-reduce (or the user's hook)
    --end of the same backward--> `_finish`: the rest goes out, all are waited for, and param.grad, a view
    of the bucket, is the average.

[Note: Used and unused]
A bucket with an unused parameter goes out at the end of backward, with zeros for it. Which parameters were
used on no rank at all is known from the rides (rides.py), which travel in the last bucket: those keep
the gradient that they had, None as a rule.

[Note: Order of launch]
Every rank must launch its buckets in the same order. It is the plan's, until rank 0 has seen in which order
backward really fills them; rank 0's order is then sent to all: after the 1st, 10th and 100th
synchronised backward and after every 1000th. Only the order of launch changes: what lies in which bucket,
and so every sum, does not.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep import collectives
from samestep.errors import GradientError
from samestep.gradients.backward import BackwardWatch, reaches_any
from samestep.gradients.bucket import Bucket, Slot, make_buckets
from samestep.gradients.buckets import BucketPlan
from samestep.gradients.hooks import CommunicationHook, GradBucket, result_of
from samestep.gradients.rides import (
    CARRIER_DTYPES,
    MOST_ITEMS,
    Rides,
    num_rides,
    read_rides,
    write_rides,
)
from samestep.gradients.sparse import reduce_sparse

__all__ = ["REDUCTIONS", "Reducer"]

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
    ) -> None:
        self.plan = plan
        self.group = group
        self.synchronise = True
        self.static_graph = static_graph
        self.release_unused = release_unused
        self.reduction = reduction
        self.divisor = group.size()  # of a mean; fewer where ranks have run out of data (join.py)
        self.num_backwards = 0  # synchronised ones
        self.on_backward: list[Callable[[bool], None]] = []  # called as each begins, with `synchronise`
        self.on_synchronised: list[Callable[[], None]] = []  # called when the gradients are the same
        self._items = 0
        self._hook: tuple[Any, CommunicationHook] | None = None
        self._syncing = False
        self._num_early = 0
        self._wait_s = 0.0

        self.slots = [
            Slot(i, info.name, param)
            for i, (info, param) in enumerate(zip(plan.parameters, parameters, strict=True))
        ]
        self.buckets = make_buckets(plan, self.slots, num_rides(len(self.slots)))
        self._sparse = [self.slots[i] for i in plan.sparse]
        self._order = list(range(len(self.buckets)))  # of launch
        self._next = 0  # position in it of the bucket to go out next
        self._num_filled = 0
        self._in_flight: list[tuple[Bucket, Any]] = []
        self._carry_alone: Tensor | None = None
        self._choose_carrier()

        me = weakref.ref(self)  # hooks live as long as parameters do: they must not keep the reducer
        self._watch = BackwardWatch(
            [slot.node for slot in self.slots],
            begin=lambda: _alive(me)._begin(),
            end=lambda: _alive(me)._finish(),
            of_parameters=lambda: _alive(me)._refuse_grad_of_parameters(),
        )
        self._nodes = frozenset(slot.node for slot in self.slots)
        self._handles = [
            slot.param.register_post_accumulate_grad_hook(_hook_for(me, slot.index)) for slot in self.slots
        ]

    def close(self) -> None:
        """Parameters are left alone from now on; their gradients stay where they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # What the wrapper calls

    def watch_output(self, tensor: Tensor) -> None:
        """The backward through `tensor`, an output that requires a gradient, will be noticed."""
        if tensor.grad_fn is not None:
            watch = self._watch
            tensor.register_hook(partial(_forward_to, weakref.ref(watch), self._reaches(tensor)))

    def settle(self) -> bool:
        """If the last backward raised midway, the ranks are in step again and its gradients are gone.

        Ranks: those on which it raised, before their next backward; the others take part in `_finish`.

        Returns:
            Whether there was one, synchronised, so that the other ranks know by now.
        """
        if self._watch.abandoned and _current_task() < 0:
            return self._settle()
        return False

    def count_items(self, items: int) -> None:
        """The micro-batch at hand counted `items` items: its weight in the average."""
        if self.reduction != "weighted":
            raise GradientError(
                f'items were counted, but reduction is "{self.reduction}": wrap the model with '
                'reduction="weighted"'
            )
        if items < 0 or self._items + items > MOST_ITEMS:
            raise GradientError(f"a count of {items} items: it must be from 0 to 2**48 - 1 in all")
        self._items += items

    def set_hook(self, state: Any, hook: CommunicationHook) -> None:
        """Full buckets are given to `hook(state, bucket)` instead of being all-reduced."""
        self._hook = (state, hook)
        self._choose_carrier()

    @property
    def has_hook(self) -> bool:
        """Whether a communication hook was set."""
        return self._hook is not None

    @property
    def running(self) -> bool:
        """Whether a backward is under way."""
        return self._watch.running

    def synchronise_now(self) -> None:
        """What was accumulated without synchronising is averaged now, without a backward.

        Ranks: all. One that has accumulated nothing contributes nothing.
        """
        self.settle()
        if self.running:
            raise GradientError("sync_gradients() was called inside of a backward: call it after it")
        self._begin(force=True)
        self._finish()

    def statistics(self) -> dict[str, Any]:
        """What the reducer has done so far: counts, bytes, seconds, the order of launch."""
        return {
            "world_size": self.group.size(),
            "num_parameters": len(self.slots),
            "num_buckets": len(self.buckets),
            "bucket_bytes": [self.plan.bucket_bytes(b.index) for b in self.buckets],
            "launch_order": list(self._order),
            "num_synchronised_backwards": self.num_backwards,
            "num_buckets_launched_early": self._num_early,
            "wait_s": self._wait_s,
        }

    # One backward

    def _reaches(self, tensor: Tensor) -> bool:
        return reaches_any(tensor, self._nodes)

    def _begin(self, *, force: bool = False) -> None:
        if self._watch.abandoned:
            self._settle()
        self._syncing = self.synchronise or force
        for notify in self.on_backward:
            notify(self._syncing)
        if not self._syncing:
            return
        if torch.is_grad_enabled() and not force:
            raise GradientError(
                "backward(create_graph=True) would lose the graph of the averaged gradients: use "
                "torch.autograd.grad(..., create_graph=True) for the inner gradient, or no_sync()"
            )
        for bucket in self.buckets:
            bucket.reset()
        self._next = 0
        self._num_filled = 0
        self._in_flight = []
        if self.release_unused and not force and self.num_backwards:
            self._release_unused()

    def _release_unused(self) -> None:
        for slot in self.slots:
            if slot.bucket is not None and not torch._C._will_engine_execute_node(slot.node):
                slot.firings = slot.expected
                slot.bucket.waiting -= 1

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
        if slot.firings == slot.expected:
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self._on_filled(bucket)
        elif slot.firings > slot.expected and bucket.launched:
            self._refuse_late(slot)

    def _on_filled(self, bucket: Bucket) -> None:
        bucket.filled_at = self._num_filled
        self._num_filled += 1
        if self.num_backwards:  # the first one shows how often each fires: nothing goes out early
            self._launch_ready()

    def _launch_ready(self) -> None:
        while self._next < len(self._order):
            bucket = self.buckets[self._order[self._next]]
            if bucket.waiting or bucket.held:
                return
            self._num_early += 1
            self._launch(bucket)

    def _launch(self, bucket: Bucket, *, abandoned: bool = False) -> None:
        position = self._next
        self._next += 1
        bucket.launched = True
        if self.group.size() == 1 and self._hook is None:
            return
        if abandoned:
            bucket.gradients.zero_()
        else:
            bucket.fill(self._scale_before())
        work: Any
        if self._hook is not None:
            state, hook = self._hook
            work = hook(state, GradBucket(bucket, position, len(self._order)))
        elif position == len(self._order) - 1 and self._carry_alone is None:
            self._write_rides(bucket.rides, abandoned)
            work = collectives.all_reduce(bucket.buffer, self.group)
        else:
            work = collectives.all_reduce(bucket.gradients, self.group)
        self._in_flight.append((bucket, work))

    def _finish(self) -> None:
        if not self._syncing:
            return
        try:
            rides = self._complete(abandoned=False)
            if rides is not None and rides.abandoned:
                for slot in self.slots:
                    slot.param.grad = None
                raise GradientError(
                    f"rank {self.group.rank()}: {rides.abandoned} other rank(s) gave up in the middle of "
                    "this backward (their own error says why): its gradients were dropped"
                )
            self._put_gradients(rides)
        finally:
            self._syncing = False
            self._items = 0
            for slot in self.slots:
                slot.used = False
        self._after_finish()

    def _after_finish(self) -> None:
        self.num_backwards += 1
        if self.num_backwards == 1 and self.static_graph:
            for slot in self.slots:
                slot.expected = max(1, slot.firings)
        if self.group.size() > 1 and _is_time_to_agree(self.num_backwards) and len(self._order) > 1:
            self._agree_on_order()
        for notify in self.on_synchronised:
            notify()

    def _complete(self, *, abandoned: bool) -> Rides | None:
        """All that has not gone out goes out, and all is waited for. None: the rides tell nothing new."""
        unused = not all(slot.used for slot in self.slots)
        while self._next < len(self._order):
            self._launch(self.buckets[self._order[self._next]], abandoned=abandoned)
        if self.group.size() == 1:
            self._wait()
            return Rides(tuple(int(slot.used) for slot in self.slots), self._items)
        alone = self._carry_alone
        work = None
        if alone is not None:
            self._write_rides(alone, abandoned)
            work = collectives.all_reduce(alone, self.group)
        self._wait()
        if work is not None:
            work.wait()
        self._reduce_sparse(abandoned)
        carrier = alone if alone is not None else self.buckets[self._order[-1]].rides
        on_cpu = carrier.device.type == "cpu"  # elsewhere, looking costs a wait for the device
        return read_rides(carrier) if unused or on_cpu or self.reduction == "weighted" else None

    def _wait(self) -> None:
        start = time.perf_counter()
        for bucket, work in self._in_flight:
            try:
                if self._hook is not None:
                    result = result_of(work, self._hook[1])
                    if result.data_ptr() != bucket.buffer.data_ptr():
                        bucket.gradients.copy_(result.view(-1))
                else:
                    work.wait()
            except RuntimeError as error:
                if isinstance(error, GradientError):
                    raise
                raise GradientError(self._what_failed(bucket, error)) from error
        self._in_flight = []
        self._wait_s += time.perf_counter() - start

    def _what_failed(self, bucket: Bucket, error: Exception) -> str:
        position = self._order.index(bucket.index) + 1
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return (
            f"rank {self.group.rank()} of {self.group.size()}: synchronised backward "
            f"{self.num_backwards + 1}, {bucket.describe()}, the {position}. of {len(self._order)} to go "
            f"out, was not reduced: {reason}"
        )

    def _put_gradients(self, rides: Rides | None) -> None:
        factor = self._scale_after(rides)
        if factor != 1.0:
            for bucket in self.buckets:
                bucket.gradients.mul_(factor)
        if rides is None:
            return
        for slot, num_used in zip(self.slots, rides.used, strict=True):
            if num_used and not slot.used and slot.view is not None:
                slot.param.grad = slot.view

    def _settle(self) -> bool:
        syncing, self._syncing = self._syncing, False
        self._watch.forget()
        if not syncing:
            return False
        # The other ranks wait for the buckets that this one has not sent: they get zeros, and the word.
        for slot in self.slots:
            slot.param.grad = None
            slot.used = False
        self._items = 0
        self._complete(abandoned=True)
        return True

    # Scales, rides, order

    def _scale_before(self) -> float:
        return 1.0 / self.divisor if self.reduction == "mean" and self._hook is None else 1.0

    def _scale_after(self, rides: Rides | None) -> float:
        # A hook divides by the number of ranks by itself, as torch's do.
        undone = float(self.group.size()) if self._hook is not None else 1.0
        if self.reduction == "sum":
            return undone
        if self.reduction == "weighted":
            assert rides is not None
            if rides.items == 0:
                raise GradientError(
                    'reduction="weighted", but no rank counted any items in this step: call '
                    "model.weigh(loss, items) or model.count_items(items) for each micro-batch"
                )
            return undone / rides.items
        return 1.0

    def _write_rides(self, rides: Tensor, abandoned: bool) -> None:
        used = [slot.used for slot in self.slots]
        write_rides(rides, None if all(used) else used, self._items, abandoned)

    def _choose_carrier(self) -> None:
        """The rides travel in the last bucket, or alone where a hook or a narrow dtype forbids that."""
        last = self.buckets[self._order[-1]] if self.buckets else None
        if self._hook is None and last is not None and last.buffer.dtype in CARRIER_DTYPES:
            self._carry_alone = None
            return
        device = collectives.device_of(self.group)
        self._carry_alone = torch.zeros(num_rides(len(self.slots)), device=device)

    def _agree_on_order(self) -> None:
        never = len(self.buckets)
        turns = [never if b.filled_at < 0 or b.held else b.filled_at for b in self.buckets]
        order = sorted(self._order, key=lambda index: turns[index])  # stable: ties stay as they were
        word = torch.tensor(order, dtype=torch.int64, device=collectives.device_of(self.group))
        collectives.broadcast(word, self.group, src=0).wait()
        self._order = [int(index) for index in word.tolist()]
        self._choose_carrier()

    def _reduce_sparse(self, abandoned: bool) -> None:
        if self._sparse:
            scale = 1.0 / self.divisor if self.reduction == "mean" else 1.0
            params = [slot.param for slot in self._sparse]
            reduce_sparse(params, scale, self.group, contribute=not abandoned)

    # Refusals

    def _refuse_late(self, slot: Slot) -> None:
        raise GradientError(
            f"rank {self.group.rank()}: the gradient of {slot.name} grew after it had been reduced: a "
            "re-entrant checkpoint used it again, which no backward before this one did. Use "
            "checkpoint(..., use_reentrant=False)"
        )

    def _refuse_grad_of_parameters(self) -> None:
        if self.synchronise and not torch.is_grad_enabled():
            raise GradientError(
                "torch.autograd.grad of parameters gives the gradient of this rank's data alone: call "
                "loss.backward() for the average, or do it under no_sync() if that is what you mean"
            )


def _alive(reference: weakref.ref[Reducer]) -> Reducer:
    reducer = reference()
    assert reducer is not None, "a reducer's backward outlived it"
    return reducer


def _hook_for(reference: weakref.ref[Reducer], index: int) -> Callable[[Tensor], None]:
    def on_gradient(_param: Tensor) -> None:
        reducer = reference()
        if reducer is not None:
            reducer._on_gradient(reducer.slots[index])

    return on_gradient


def _forward_to(reference: weakref.ref[BackwardWatch], reaches_parameters: bool, gradient: Tensor) -> None:
    watch = reference()
    if watch is not None:
        watch.on_output(reaches_parameters, gradient)


def _is_time_to_agree(num_backwards: int) -> bool:
    return num_backwards in (1, 10, 100) or num_backwards % 1000 == 0
