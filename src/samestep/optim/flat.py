"""Flat buffers: the parameters of a bucket side by side, so that slices and all-gathers need no copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep import collectives
from samestep.errors import OptimizerError
from samestep.gradients.bucket import Bucket, Slot, view_like
from samestep.optim.layout import BucketLayout, Piece
from samestep.optim.state import flat_view

__all__ = ["FlatBucket"]


class FlatBucket:
    """The parameters of one bucket, which are views of its buffer from now on.

    Where the reducer's bucket holds the same parameters in the same order, their gradients lie side by side
    as well; else this rank's part of them is copied together before each update.

    Args:
        layout: of the bucket.
        parameters: those of the layout, in its order.
        group: the ranks.
        source: the reducer's bucket that the layout follows.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        source: Bucket | None,
    ) -> None:
        self.layout = layout
        self.parameters = list(parameters)
        first = parameters[0]
        self._group = group
        self._own = slice(layout.cuts[group.rank()], layout.cuts[group.rank() + 1])
        self.buffer = collectives.empty_for_reduction(layout.numel, first.dtype, first.device, group)
        self._views = [
            view_like(parameter, self.buffer, offset)
            for parameter, offset in zip(parameters, layout.offsets(), strict=True)
        ]
        self._addresses = [view.data_ptr() for view in self._views]
        self._position = {number: i for i, number in enumerate(layout.parameters)}
        self.source = source
        self._slots: dict[int, Slot] = {}
        if source is not None:
            of = {id(slot.param): slot for slot in source.slots}
            self._slots = {n: of[id(p)] for n, p in zip(layout.parameters, parameters, strict=True)}
        self._follows = source is not None and len(source.slots) == len(parameters)
        self._gathered: Tensor | None = None  # this rank's part of the gradients, where they must be copied
        self.adopt(moved=True)

    def adopt(self, *, moved: bool = False) -> None:
        """Parameters whose memory the script has replaced lie in the buffer again, with their new values.

        `moved`: all have been.
        """
        for parameter, view, address in zip(self.parameters, self._views, self._addresses, strict=True):
            if moved or parameter.data_ptr() != address:
                view.copy_(parameter.detach())
                parameter.data = view

    def has_gradients(self) -> bool:
        """Whether any of its parameters has one, on whichever rank it is updated."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def gather_gradients(self) -> Any:
        """Gradients of which each rank has its slice come together; a work, or None if they are whole.

        Ranks: all, and then `take_whole_gradients`.
        """
        if not any(
            slot.sliced is not None and slot.param.grad is slot.sliced for slot in self._slots.values()
        ):
            return None
        assert self.source is not None
        return collectives.gather_slices(self.source.gradients, self.layout.cuts, self._group)

    def take_whole_gradients(self) -> None:
        """They have come together."""
        for slot in self._slots.values():
            if slot.sliced is not None and slot.param.grad is slot.sliced:
                slot.param.grad = slot.view

    def view_of(self, parameter: int) -> Tensor:
        """The place of a parameter, shaped like it."""
        return self._views[self._position[parameter]]

    def values(self, start: int, stop: int) -> Tensor:
        """The elements `start`, ..., `stop - 1` of the buffer, in a tensor that is no view to autograd."""
        return _part(self.buffer, start, stop)

    def gradient_place(self, start: int, stop: int) -> Tensor:
        """Where the gradients of these elements, all this rank's, will be before an update."""
        if self._follows:
            assert self.source is not None
            return _part(self.source.buffer, start, stop)
        if self._gathered is None:
            self._gathered = torch.empty_like(self.buffer[self._own])
        return _part(self._gathered, start - self._own.start, stop - self._own.start)

    def bring_gradient(self, piece: Piece) -> bool:
        """The gradient of `piece` is in its place; False if there is none."""
        index = self._position[piece.parameter]
        grad = self.parameters[index].grad
        if grad is None:
            return False
        slot = self._slots.get(piece.parameter)
        if slot is not None and (grad is slot.view or grad is slot.sliced):
            if self._follows:
                return True
            assert slot.view is not None
            grad = slot.view
        if grad.is_sparse:
            raise OptimizerError(
                f"a sparse gradient of shape {list(grad.shape)} cannot be cut: pass elementwise=False, or "
                "wrap the model in samestep.DistributedDataParallel, which knows its sparse embeddings"
            )
        view = self._views[index]
        if grad.stride() != view.stride():
            grad = torch.empty_like(view).copy_(grad)
        place = self.gradient_place(piece.offset, piece.offset + piece.numel)
        place.copy_(flat_view(grad)[piece.start : piece.stop])
        return True

    def whole_gradient(self, parameter: int) -> Tensor | None:
        """The gradient of a parameter that this rank owns whole, wherever it lies."""
        grad = self.parameters[self._position[parameter]].grad
        slot = self._slots.get(parameter)
        return slot.view if slot is not None and grad is not None and grad is slot.sliced else grad


def _part(buffer: Tensor, start: int, stop: int) -> Tensor:
    part = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
    return part.set_(buffer.untyped_storage(), buffer.storage_offset() + start, (stop - start,), (1,))
