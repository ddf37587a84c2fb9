"""One bucket: a flat buffer, and the places in it that are its parameters' gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.collectives import empty_for_reduction
from samestep.gradients.buckets import BucketPlan
from samestep.gradients.sliced import SlicedGradient

__all__ = ["Bucket", "Slot", "make_buckets", "view_like"]

_SMALL_NUMEL = 32 * 1024


class Slot:
    """One parameter, its place in a bucket, and what the running backward has done with it."""

    __slots__ = (
        "bucket",
        "expected",
        "firings",
        "index",
        "name",
        "nested",
        "node",
        "param",
        "released",
        "sliced",
        "used",
        "view",
    )

    def __init__(self, index: int, name: str, param: torch.nn.Parameter) -> None:
        self.index = index
        self.name = name
        self.param = param
        # Holding the node keeps it the same one in every graph, so that the engine can be asked about it.
        self.node = torch.autograd.graph.get_gradient_edge(param).node
        self.bucket: Bucket | None = None  # None: its gradient is sparse and travels outside of buckets
        self.view: Tensor | None = None  # its part of the bucket's buffer, shaped and strided like it
        self.sliced: SlicedGradient | None = None  # its gradient while this rank has only a slice of it
        self.firings = 0  # how often the running backward has added to its gradient
        self.expected = 1  # after how many firings its gradient is complete
        self.nested = False  # it has fired in a backward inside of the backward (re-entrant checkpointing)
        self.released = False  # the engine has said that the running backward will not reach it
        self.used = False  # its gradient holds something that was not yet synchronised


@dataclass(eq=False)
class Bucket:
    """A flat buffer: the gradients of its slots, room for the rides (see rides.py), padding."""

    index: int
    slots: list[Slot]
    buffer: Tensor
    numel: int
    num_rides: int
    waiting: int = 0  # slots whose gradient is not complete in the running backward
    held: bool = False  # launch it at the end of backward, whatever fires before
    filled_at: int = -1  # its turn among the buckets to be filled in the running backward
    launched: bool = False

    @property
    def gradients(self) -> Tensor:
        """The gradients' part of the buffer, flat."""
        return self.buffer[: self.numel]

    @property
    def rides(self) -> Tensor:
        """The place of the rides, behind the gradients."""
        return self.buffer[self.numel : self.numel + self.num_rides]

    def describe(self) -> str:
        """The bucket's number and the names of its parameters, for messages."""
        names = [slot.name for slot in self.slots]
        shown = ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"
        return f"bucket {self.index} ({shown})"

    def reset(self) -> None:
        """Nothing has fired yet."""
        self.waiting = len(self.slots)
        self.filled_at = -1
        self.launched = False
        for slot in self.slots:
            slot.firings = 0
            slot.released = False

    @torch.no_grad()
    def fill(self, scale: float) -> None:
        """The buffer holds this rank's gradients times `scale`, zeros where there are none.

        A parameter that has a gradient has its place in the buffer as `param.grad` from now on.
        """
        places: list[Tensor] = []
        found: list[Tensor] = []
        in_place: list[Tensor] = []
        for slot in self.slots:
            grad, view = slot.param.grad, slot.view
            assert view is not None
            if grad is view:
                in_place.append(view)
            elif grad is None:
                view.zero_()
            else:
                places.append(view)
                found.append(grad.to_dense() if grad.is_sparse else grad)
                slot.param.grad = view
        self._fill(self.gradients, places, found, in_place, scale)

    @torch.no_grad()
    def move_to(self, flat: Tensor, views: Sequence[Tensor], scale: float) -> None:
        """`flat`, laid out like the buffer, holds the gradients times `scale`; the parameters have none.

        `views`: the slots' places in `flat`.
        """
        places: list[Tensor] = []
        found: list[Tensor] = []
        for slot, view in zip(self.slots, views, strict=True):
            grad = slot.param.grad
            if grad is None:
                view.zero_()
            else:
                places.append(view)
                found.append(grad.to_dense() if grad.is_sparse else grad)
            slot.param.grad = None
        self._fill(flat[: self.numel], places, found, [], scale)

    def _fill(
        self, flat: Tensor, places: list[Tensor], found: list[Tensor], in_place: list[Tensor], scale: float
    ) -> None:
        if scale == 1.0:
            if places:
                torch._foreach_copy_(places, found)
        elif not places:
            flat.mul_(scale)
        elif not in_place and self.numel < _SMALL_NUMEL * len(self.slots):
            torch._foreach_copy_(places, found)
            flat.mul_(scale)
        else:
            # One pass over memory instead of two; the call overhead is small against such sizes.
            for view, grad in zip(places, found, strict=True):
                if grad.dtype == view.dtype:
                    torch.mul(grad, scale, out=view)
                else:
                    view.copy_(grad).mul_(scale)
            if in_place:
                torch._foreach_mul_(in_place, scale)


def make_buckets(
    plan: BucketPlan,
    slots: Sequence[Slot],
    num_rides: int,
    group: dist.ProcessGroup,
    padded: Callable[[int], int] = int,
) -> list[Bucket]:
    """The buckets of `plan` with buffers for `group` to reduce, each slot with its view.

    Args:
        plan: which parameter travels in which bucket.
        slots: of the plan's parameters.
        num_rides: elements behind the gradients of each bucket.
        group: the ranks.
        padded: the length that a buffer of so many elements is to have at least.
    """
    buckets = []
    for index, members in enumerate(plan.buckets):
        ours = [slots[i] for i in members]
        first = ours[0].param
        numel = sum(slot.param.numel() for slot in ours)
        buffer = empty_for_reduction(padded(numel + num_rides), first.dtype, first.device, group).zero_()
        bucket = Bucket(index, ours, buffer, numel, num_rides)
        offset = 0
        for slot in ours:
            slot.bucket = bucket
            slot.view = view_like(slot.param, buffer, offset)
            offset += slot.param.numel()
        bucket.reset()
        buckets.append(bucket)
    return buckets


def view_like(param: Tensor, buffer: Tensor, offset: int) -> Tensor:
    """The part of `buffer` from `offset` on, with the strides of `param` if those leave no gaps."""
    # set_() and not as_strided(): the result shares memory with the buffer but is no view to autograd,
    # so that whatever may be done to a gradient (detach_, in-place updates in a graph) may be done to it.
    stride = _dense_strides(param)
    view = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
    return view.set_(buffer.untyped_storage(), offset, param.shape, stride)


def _dense_strides(param: Tensor) -> tuple[int, ...]:
    # empty_like(preserve_format) keeps the strides of whatever is dense without overlaps, and gives
    # contiguous ones otherwise: the very choice that autograd makes for a gradient.
    return torch.empty_like(param, device="meta").stride()
