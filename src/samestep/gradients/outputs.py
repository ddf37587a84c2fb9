"""The tensors inside whatever a module returns: tuples, dicts, dataclasses, named tuples, model outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["map_tensors", "tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `value`, in a fixed order, looking into nested containers; each object once."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    yield from _tensors_in(value, set())


def _tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if value is None or isinstance(value, (str, bytes, int, float, bool)) or id(value) in seen:
        return
    seen.add(id(value))
    for child in _children(value):
        yield from _tensors_in(child, seen)


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, PackedSequence):  # a tuple, of which only the data is
        yield value.data
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (tuple, list, set, frozenset)):
        yield from value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield getattr(value, field.name, None)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)):
        # A plain object, such as a Hugging Face output that is not a mapping or an RRef's local value.
        yield from vars(value).values()


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
