"""The tensors inside whatever a module returns: tuples, dicts, dataclasses, named tuples, model outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["map_tensors", "tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `value`, in a fixed order, looking into nested containers.

    Of an object of any other class its attributes are looked at too, but not objects inside of those: an
    output that refers to a data set or a trainer must not be searched to its end in every step.
    """
    yield from _tensors_in(value, set(), inside_object=False)


def _tensors_in(value: Any, seen: set[int], *, inside_object: bool) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if value is None or isinstance(value, (str, bytes, int, float, bool)) or id(value) in seen:
        return
    children = _children(value)
    if children is None:
        if inside_object or not hasattr(value, "__dict__") or isinstance(value, (type, torch.nn.Module)):
            return
        children, inside_object = vars(value).values(), True
    seen.add(id(value))
    for child in children:
        yield from _tensors_in(child, seen, inside_object=inside_object)


def _children(value: Any) -> Iterable[Any] | None:
    """What a container holds; None if `value` is no container."""
    if isinstance(value, PackedSequence):  # a tuple, of which only the data is
        return (value.data,)
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (tuple, list)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    return None


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `fn` applied to each tensor in tuples, lists, dicts, named tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):
        return value.to(device=fn(value.data).device)  # type: ignore[call-arg]  # torch's stub lacks it
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(fn, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)([map_tensors(fn, item) for item in value])
    if isinstance(value, dict):
        items = {key: map_tensors(fn, item) for key, item in value.items()}
        return items if type(value) is dict else _rebuilt(value, items)
    if is_dataclass(value) and not isinstance(value, type):
        return _dataclass_mapped(fn, value)
    return value


def _rebuilt(value: dict[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        return type(value)(items)
    except TypeError:
        return items


def _dataclass_mapped(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    mapped = copy.copy(value)
    for field in fields(value):
        object.__setattr__(mapped, field.name, map_tensors(fn, getattr(value, field.name)))
    return mapped
