"""Communication hooks: what is done with a bucket that is full. torch's own run here unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from samestep.errors import GradientError
from samestep.gradients.bucket import Bucket

__all__ = ["CommunicationHook", "GradBucket", "check_hook", "result_of"]

CommunicationHook = Callable[[Any, "GradBucket"], "Future[Any]"]


class GradBucket:
    """A full bucket as a communication hook sees it: the methods of torch's class of this name."""

    def __init__(self, bucket: Bucket, position: int, num_buckets: int) -> None:
        self._bucket = bucket
        self._position = position
        self._num_buckets = num_buckets
        self._buffer = bucket.gradients

    def index(self) -> int:
        """The bucket's number in the plan, from 0: the same whenever it goes out."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """This rank's gradients, flat, not divided by the number of ranks."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """`buffer` takes the place of the flat gradients; the hook's future decides what comes back."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """The gradients, each with its parameter's shape."""
        if self._buffer.dtype == self._bucket.buffer.dtype and self._aliases():
            return [slot.view for slot in self._bucket.slots if slot.view is not None]
        parts = self._buffer.split([slot.param.numel() for slot in self._bucket.slots])
        return [p.view(s.param.shape) for p, s in zip(parts, self._bucket.slots, strict=True)]

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, in the order of `gradients()`."""
        return [slot.param for slot in self._bucket.slots]

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward."""
        return self._position == self._num_buckets - 1

    def _aliases(self) -> bool:
        return self._buffer.data_ptr() == self._bucket.buffer.data_ptr()


def check_hook(hook: object) -> None:
    """Return if `hook` can be called as a communication hook.

    Raises:
        TypeError: it is not callable.
        ValueError: its annotations name another bucket or another result.
        GradientError: it cannot be called with a state and a bucket.
    """
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable, got {type(hook).__name__}.")
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return  # a builtin, which says nothing of itself
    try:
        signature.bind(None, None)
    except TypeError:
        raise GradientError(
            f"a communication hook is called as hook(state, bucket), which {hook!r} does not take"
        ) from None
    bucket = signature.parameters.get("bucket")
    if bucket is not None and not _may_be_bucket(bucket.annotation):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    result = signature.return_annotation
    if result not in (inspect.Signature.empty, Any) and "Future" not in str(result) and result != "Any":
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor], "
            f"got {result}."
        )


def _may_be_bucket(annotation: Any) -> bool:
    if isinstance(annotation, str):  # from __future__ import annotations
        return annotation.endswith("GradBucket") or annotation in ("Any", "object")
    return annotation in (inspect.Parameter.empty, dist.GradBucket, GradBucket, Any, object)


def result_of(future: Any, hook: object) -> Tensor:
    """The tensor that a hook's future holds, once it is done.

    Raises:
        GradientError: the hook returned something else than a future of a tensor.
    """
    if not hasattr(future, "wait"):
        raise GradientError(
            f"the communication hook {hook!r} returned {type(future).__name__}: it must return a "
            "torch.futures.Future of a tensor"
        )
    value = future.wait()
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Tensor):
        raise GradientError(
            f"the future that the communication hook {hook!r} returned holds "
            f"{type(value).__name__}: it must hold a tensor"
        )
    return value
