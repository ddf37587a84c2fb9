"""Parameter groups: copied, completed, compared. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from samestep.errors import OptimizerError

__all__ = ["NOT_OPTIONS", "as_groups", "check_sizes", "copy_options", "number_parameters", "with_names"]

NOT_OPTIONS = ("params", "param_names")


def as_groups(params: Iterable[Any]) -> list[Any]:
    """What an optimizer's constructor takes, so that it may be given twice; groups are copies."""
    found = list(params) if not isinstance(params, Tensor) else params
    return [dict(group) if isinstance(group, dict) else group for group in found]


def with_names(param_group: dict[str, Any]) -> dict[str, Any]:
    """A complete group as `add_param_group` takes it."""
    names = param_group.get("param_names")
    group = {key: value for key, value in param_group.items() if key != "param_names"}
    group["params"] = list(zip(names, group["params"], strict=True)) if names else list(group["params"])
    return group


def copy_options(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """The groups of `target` have the options of those of `source`."""
    for one, other in zip(source, target, strict=True):
        other.update({key: value for key, value in one.items() if key not in NOT_OPTIONS})


def check_sizes(saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> None:
    """Return if saved groups are as large as our `own`.

    Raises:
        OptimizerError: they are not.
    """
    own_sizes = [len(group["params"]) for group in own]
    saved_sizes = [len(group["params"]) for group in saved]
    if own_sizes != saved_sizes:
        raise OptimizerError(
            f"the saved state is of another optimizer: its groups hold {saved_sizes} parameters, this one's "
            f"{own_sizes}. Build it over the same parameters and groups"
        )


def number_parameters(param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups as a state_dict() has them: numbers for parameters."""
    result = []
    first = 0
    for group in param_groups:
        count = len(group["params"])
        packed = {key: value for key, value in group.items() if key != "params"}
        packed["params"] = list(range(first, first + count))
        first += count
        result.append(packed)
    return result
