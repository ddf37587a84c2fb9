"""What an optimizer looks at: single elements, whole parameters, or more than one rank can have."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import optim

from samestep.errors import OptimizerError

__all__ = ["Kind", "is_torchs_own", "kind_of"]


class Kind(enum.Enum):
    """How finely an optimizer's work can be dealt out."""

    ELEMENTS = enum.auto()  # an element's update depends on that element alone: any cut will do
    WHOLE = enum.auto()  # a parameter's update depends on all of it (a norm, rows, a matrix): one rank has it


def _step_of(optimizer_class: Any) -> Any:
    return inspect.unwrap(optimizer_class.step)  # torch wraps it when the first instance is made


_ELEMENTS = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adagrad,
    optim.RMSprop,
    optim.Adadelta,
    optim.Adamax,
    optim.ASGD,
    optim.Rprop,
)
_WHOLE = (optim.Adafactor, optim.SparseAdam, *((optim.Muon,) if hasattr(optim, "Muon") else ()))


def kind_of(optimizer_class: Callable[..., torch.optim.Optimizer], elementwise: bool | None) -> Kind:
    """The kind of `optimizer_class`: by what the user says, else by what torch's own are known to be.

    A class that nobody knows is dealt out by whole parameters, which is right for all that look at one
    parameter at a time. A class may say so itself, by an attribute `elementwise`.

    Raises:
        OptimizerError: it looks at all parameters at once.
    """
    step = _step_of(optimizer_class) if hasattr(optimizer_class, "step") else None
    if step is _step_of(optim.LBFGS):
        raise OptimizerError(
            "LBFGS chooses its step by products over all parameters at once, so no rank could take its part "
            "of it alone: use torch.optim.LBFGS itself on every rank"
        )
    if elementwise is None:
        elementwise = getattr(optimizer_class, "elementwise", None)
    known_whole = any(step is _step_of(known) for known in _WHOLE)
    if elementwise is not None:
        if elementwise and known_whole:
            raise OptimizerError(
                f"{getattr(optimizer_class, '__name__', optimizer_class)} looks at whole parameters: drop "
                "elementwise=True"
            )
        return Kind.ELEMENTS if elementwise else Kind.WHOLE
    known = any(step is _step_of(known) for known in _ELEMENTS)
    return Kind.ELEMENTS if known else Kind.WHOLE


def is_torchs_own(optimizer_class: Any) -> bool:
    """Whether its step is torch's: it keeps nothing beside `state`, and counts steps per parameter."""
    step = _step_of(optimizer_class) if hasattr(optimizer_class, "step") else None
    return any(step is _step_of(known) for known in (*_ELEMENTS, *_WHOLE))
