"""Optimizers that torch's `_apply_optimizer_in_backward` hung on parameters: they step on averages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

__all__ = ["step_in_backward", "take_over"]

_OPTIMIZERS = "_in_backward_optimizers"  # torch's attribute


def take_over(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether any of `parameters` has such optimizers; torch's own hooks, which would step on this
    rank's gradient alone, are removed."""
    found = [p for p in parameters if hasattr(p, _OPTIMIZERS)]
    if not found:
        return False
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for parameter in found:
        for handle in param_to_optim_hook_handle_map.pop(parameter, []):
            handle.remove()
    return True


def step_in_backward(parameters: Sequence[nn.Parameter]) -> None:
    """Each optimizer has taken its step, and the gradients it used are gone."""
    for parameter in parameters:
        for optimizer in getattr(parameter, _OPTIMIZERS, ()):
            optimizer.step()
            parameter.grad = None
