"""The buckets' way out: in which order they are launched, what is in flight, what rides along.

[Note: Order of launch]
Every rank must launch its buckets in the same order. It is the plan's, until rank 0 has seen in which order
backward really fills them; rank 0's order is then sent to all: after the 1st, 10th and 100th
synchronised backward and after every 1000th. Only the order of launch changes: what lies in which bucket,
and so every sum, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep import collectives
from samestep.errors import GradientError
from samestep.gradients.bucket import Bucket
from samestep.gradients.clock import Clock
from samestep.gradients.doing import what_ranks_were_doing
from samestep.gradients.hooks import CommunicationHook, GradBucket, result_of
from samestep.gradients.leaves import Leaves
from samestep.gradients.rides import CARRIER_DTYPES, Rides, read_rides, write_rides

__all__ = ["BucketQueue"]

Facts = Callable[[], tuple[list[int], int]]


class BucketQueue:
    """Launches buckets in the agreed order and brings them back reduced.

    Ranks: all, launching equally many between `reset()` and `wait()`.

    Args:
        buckets: of the plan, in its order.
        leaves: the partial sums of the virtual ranks that this process plays, and how they are summed.
        num_rides: elements that the rides take behind the gradients of each bucket.
        group: the ranks.
        facts: called when the last bucket goes out: which parameters were used, how many items counted.
        clock: told when communication begins.
        where: called for messages: "synchronised backward 12".
    """

    def __init__(
        self,
        buckets: list[Bucket],
        leaves: Leaves,
        num_rides: int,
        group: dist.ProcessGroup,
        *,
        facts: Facts,
        clock: Clock,
        where: Callable[[], str],
    ) -> None:
        self.buckets = buckets
        self.order = list(range(len(buckets)))
        self.hook: tuple[Any, CommunicationHook] | None = None
        self.leaves = leaves
        self.on_all_launched: Callable[[], object] = _nothing  # before any is waited for
        self.num_early = 0  # buckets that went out before the end of their backward, so far
        self._cuts: dict[int, Sequence[int]] = {}  # of the buckets that are reduce-scattered
        self._num_rides = num_rides
        self._group = group
        self._facts = facts
        self._clock = clock
        self._where = where
        self._next = 0  # position in the order of the bucket to go out next
        self._in_flight: list[tuple[Bucket | None, Any]] = []  # None: the rides, alone
        # The rides travel in the last bucket, or alone where a hook, a narrow dtype or slices forbid that.
        self._alone: Tensor | None = None
        self._choose_carrier()

    def set_hook(self, state: Any, hook: CommunicationHook) -> None:
        """Buckets are given to `hook(state, bucket)` instead of being all-reduced."""
        self.hook = (state, hook)
        self._choose_carrier()

    def scatter(self, cuts: Mapping[int, Sequence[int]]) -> None:
        """The buckets numbered in `cuts` are reduce-scattered from now on: each rank has its slice alone.

        A communication hook is given them whole all the same.
        """
        if self._group.size() > 1:
            self._cuts.update(cuts)
        self._choose_carrier()

    def is_scattered(self, bucket: Bucket) -> bool:
        """Whether only this rank's slice of the bucket is reduced."""
        return self.hook is None and bucket.index in self._cuts

    def reset(self) -> None:
        """A backward begins: nothing has fired, nothing is under way."""
        for bucket in self.buckets:
            bucket.reset()
        self._next = 0
        self._in_flight = []

    def launch_ready(self, scale: float) -> None:
        """Buckets that are full and whose turn it is go out, their gradients times `scale`."""
        while self._next < len(self.order):
            bucket = self.buckets[self.order[self._next]]
            if bucket.waiting or bucket.held:
                return
            self.num_early += 1
            self._launch(bucket, scale, abandoned=False)

    def complete(self, scale: float, *, abandoned: bool = False) -> Rides:
        """Buckets that have not gone out do, full or not, and all are waited for.

        `abandoned`: those hold zeros, and the other ranks are told.

        Returns:
            What rode along, summed over the ranks. Where looking at it would cost a wait for the device,
            only if this rank has not used all parameters or has counted items.
        """
        while self._next < len(self.order):
            self._launch(self.buckets[self.order[self._next]], scale, abandoned=abandoned)
        used, items = self._facts()
        self.on_all_launched()
        if self._group.size() == 1:
            self._wait()
            return Rides(tuple(map(int, used)), items)
        if self.hook is not None:
            self._wait()  # hooks' callbacks may still issue collectives, at their own times: ours go after
        if self._alone is not None:
            write_rides(self._alone, used, items, abandoned)
            self._in_flight.append((None, collectives.all_reduce(self._alone, self._group)))
        self._wait()
        carrier = self._alone if self._alone is not None else self.buckets[self.order[-1]].rides
        if carrier.device.type == "cpu" or items or not all(used):
            return read_rides(carrier)
        return Rides((self._group.size(),) * len(used))

    def agree_on_order(self) -> None:
        """The order is that in which rank 0's last backward filled the buckets, those held back last.

        Ranks: all.
        """
        never = len(self.buckets)
        turns = [never if b.filled_at < 0 or b.held else b.filled_at for b in self.buckets]
        order = sorted(self.order, key=lambda index: turns[index])  # stable: ties stay as they were
        word = torch.tensor(order, dtype=torch.int64, device=collectives.device_of(self._group))
        collectives.broadcast(word, self._group, src=0).wait()
        self.order = [int(index) for index in word.tolist()]
        self._choose_carrier()

    def _launch(self, bucket: Bucket, scale: float, *, abandoned: bool) -> None:
        position = self._next
        self._next += 1
        bucket.launched = True
        self._clock.launched()
        if abandoned:
            bucket.gradients.zero_()
        else:
            bucket.fill(scale)
        parts = self.leaves.close(bucket, abandoned=abandoned)
        work: Any
        if self._group.size() == 1 and self.hook is None:
            return
        if self.hook is not None:
            work = self._call_hook(bucket, position)
        elif bucket.index in self._cuts and self.leaves.may_scatter(bucket):
            work = collectives.reduce_slices(bucket.gradients, self._cuts[bucket.index], self._group)
        else:
            carries = position == len(self.order) - 1 and self._alone is None
            if carries:
                used, items = self._facts()
                write_rides(bucket.rides, used, items, abandoned)
            work = self._reduce(bucket, parts, carries=carries)
        self._in_flight.append((bucket, work))

    def _reduce(self, bucket: Bucket, parts: list[Tensor], *, carries: bool) -> Any:
        tree = self.leaves.tree
        whole = bucket.buffer if carries else bucket.gradients
        if tree is None:
            return collectives.all_reduce(whole[: bucket.numel + bucket.num_rides], self._group)
        if tree.uses_all_reduce(whole.dtype):
            return tree.start([whole], whole)
        if not carries:
            bucket.rides.zero_()  # what rode along in another step must not grow by being summed again
        try:
            return tree.start(parts, bucket.buffer)
        except RuntimeError as error:  # a sum that was started earlier failed
            raise GradientError(self._what_failed(bucket, error)) from error

    def _call_hook(self, bucket: Bucket, position: int) -> Any:
        assert self.hook is not None
        state, hook = self.hook
        if self._in_flight and bucket.buffer.device.type == "cpu":
            # Gloo runs a hook's callbacks on the two threads that move its data; powerSGD waits for a
            # collective in one. Two such hooks at a time would wait for ever.
            before = self._in_flight[-1][1]
            if hasattr(before, "wait"):
                before.wait()
        return hook(state, GradBucket(bucket, position, len(self.order)))

    def _wait(self) -> None:
        for bucket, work in self._in_flight:
            try:
                if bucket is None or self.hook is None:
                    work.wait()
                else:
                    result = result_of(work, self.hook[1])
                    if result.data_ptr() != bucket.buffer.data_ptr():
                        bucket.gradients.copy_(result.view(-1))
            except RuntimeError as error:
                if isinstance(error, GradientError):
                    raise
                raise GradientError(self._what_failed(bucket, error)) from error
        self._in_flight = []

    def _what_failed(self, bucket: Bucket | None, error: Exception) -> str:
        text = str(error).strip()
        reason = text.splitlines()[0] if text else type(error).__name__
        what = "the counts of what was used"
        if bucket is not None:
            what = f"{bucket.describe()}, {self.order.index(bucket.index) + 1} of {len(self.order)}"
        where = f"{self._where()}, {what}"
        doing = "; ".join(what_ranks_were_doing(self._group, self._where(), f"waits in {where}"))
        return (
            f"rank {self._group.rank()} of {self._group.size()}: {where}, was not reduced: {reason} [{doing}]"
        )

    def _choose_carrier(self) -> None:
        last = self.buckets[self.order[-1]] if self.buckets else None
        whole = last is not None and not self.is_scattered(last)
        if self.hook is None and whole and last is not None and last.buffer.dtype in CARRIER_DTYPES:
            self._alone = None
        else:
            self._alone = torch.zeros(self._num_rides, device=collectives.device_of(self._group))


def _nothing() -> None:
    pass
