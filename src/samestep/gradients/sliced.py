"""The gradient of a parameter of which this rank has reduced only its own slice (ShardedOptimizer, stage 2).

[Note: Sliced gradients]
It stands in `param.grad` where a whole gradient would, so that whoever reads it finds out, instead of taking
zeros or other ranks' unreduced numbers for an average: a silent `clip_grad_norm_` of the wrong norm, for
example. What a training step does by itself works: `zero_grad` of both kinds, and GradScaler's check for
infinities, whose finding all ranks share.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep import collectives
from samestep.errors import GradientError

__all__ = ["SlicedGradient"]

_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_ZERO = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


class SlicedGradient(Tensor):
    """Stands for a gradient; `part` is what this rank has of it.

    Args:
        param: whose gradient.
        name: of the parameter, for messages.
        view: the place of the whole gradient.
        part: this rank's elements of it, flat, perhaps none.
        group: the ranks that have the other parts.
    """

    parameter_name: str
    view_of_whole: Tensor
    part: Tensor
    group: dist.ProcessGroup
    _param: weakref.ref[torch.nn.Parameter]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, param: torch.nn.Parameter, name: str, view: Tensor, part: Tensor, group: dist.ProcessGroup
    ) -> SlicedGradient:
        self: SlicedGradient = torch.Tensor._make_wrapper_subclass(
            cls, view.shape, strides=view.stride(), dtype=view.dtype, device=view.device
        )
        self.parameter_name = name
        self.view_of_whole = view
        self.part = part
        self.group = group
        self._param = weakref.ref(param)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SlicedGradient({self.parameter_name}, {self.part.numel()} of {self.numel()} elements)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what needs no whole gradient, refuse the rest."""
        if func is _UNSCALE:
            return _unscale(*args)
        if func in _ZERO:
            for tensor in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
                _zero(tensor)
            return None if isinstance(args[0], (list, tuple)) else args[0]
        sliced = next(t for t in _flat(args) if isinstance(t, SlicedGradient))
        name = getattr(func, "_opname", str(func)).rstrip("_")
        what = f"{name} of the gradient of {sliced.parameter_name}"
        if name == "add" and torch._C._current_graph_task_id() >= 0:
            raise GradientError(
                f"a backward adds to the gradient of {sliced.parameter_name}, of which the last one left "
                "this rank only its slice (stage=2): call zero_grad() before, or accumulate under no_sync()"
            )
        raise GradientError(
            f"{what}: this rank has only its slice of it (stage=2). To clip, call "
            "optimizer.clip_grad_norm_(max_norm); to look at it, optimizer.gather_gradients() on all ranks; "
            "or make the optimizer with stage=1"
        )


def _flat(args: Any) -> list[Any]:
    found = []
    for arg in args:
        found += _flat(arg) if isinstance(arg, (list, tuple)) else [arg]
    return found


def _zero(tensor: Tensor) -> None:
    """The gradient is a whole one again, of zeros."""
    if not isinstance(tensor, SlicedGradient):
        tensor.zero_()
        return
    tensor.view_of_whole.zero_()
    param = tensor._param()
    if param is not None and param.grad is tensor:
        param.grad = tensor.view_of_whole


def _unscale(gradients: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """As GradScaler asks; `found_inf` is that of all ranks, which all unscale alike."""
    parts = [g.part if isinstance(g, SlicedGradient) else g for g in gradients]
    parts = [part for part in parts if part.numel()]
    if parts:
        torch._amp_foreach_non_finite_check_and_unscale_(parts, found_inf, inv_scale)
    group = next(g.group for g in gradients if isinstance(g, SlicedGradient))
    collectives.all_reduce(found_inf, group, op=dist.ReduceOp.MAX).wait()
