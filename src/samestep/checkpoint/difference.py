"""Two checkpoints compared bit by bit: `samestep verify A B`."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.checkpoint.reader import Reader, find_checkpoint

__all__ = ["Comparison", "compare", "differences"]


@dataclass(frozen=True)
class Comparison:
    """What came of comparing two checkpoints."""

    first: str | None  # where they differ first, in words; None: they are the same
    num_more: int  # further tensors and values that differ
    num_tensors: int
    num_bytes: int  # of these tensors


def compare(one: Path, other: Path) -> Comparison:
    """Whether the checkpoints `one` and `other` hold the same bits, and where they differ first.

    The step, and all entries with all their tensors and values, are compared: not who saved them, so neither
    the number of ranks, nor their random streams.

    Memory: one entry of each at a time.

    Args:
        one: a checkpoint, or a directory of checkpoints, of which the latest is taken.
        other: the same.

    Raises:
        CheckpointError: one of them cannot be read, or is not whole.
    """
    readers = [Reader(find_checkpoint(path)) for path in (one, other)]
    for reader in readers:
        reader.open()
    left, right = readers
    found: list[str] = []
    num_tensors = num_bytes = 0
    for name in [*left.entries, *(name for name in right.entries if name not in left.entries)]:
        if name not in left.entries or name not in right.entries:
            lacking = left if name not in left.entries else right
            found.append(f"the entry {name!r} is missing in {lacking.path}")
            continue
        values = [reader.read([name])[name] for reader in readers]
        found += differences(values[0], values[1], name)
        for tensor in _tensors_in(values[0]):
            num_tensors += 1
            num_bytes += tensor.numel() * tensor.itemsize
    if left.step != right.step:  # last: two steps that should be equal are asked for their tensors
        found.append(f"the step differs: {left.step} and {right.step}")
    return Comparison(found[0] if found else None, max(0, len(found) - 1), num_tensors, num_bytes)


def differences(one: Any, other: Any, where: str) -> Iterator[str]:
    """Where two values differ, type or bits, in words; one item for each tensor or plain value."""
    if isinstance(one, (np.ndarray, np.generic)) and type(one) is type(other):
        one, other = (torch.from_numpy(np.asarray(array)) for array in (one, other))
    if type(one) is not type(other):
        yield f"{where} differs: {_short(one)} and {_short(other)}"
    elif isinstance(one, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            yield f"{where} differs: {_short(one)} and {_short(other)}"
        else:
            yield from _elements(one, other, where)
    elif isinstance(one, Mapping):
        yield from _mappings(one, other, where)
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            yield f"{where} differs: {len(one)} items and {len(other)}"
        for index, (left, right) in enumerate(zip(one, other, strict=False)):
            yield from differences(left, right, f"{where}[{index}]")
    elif _bits(one) != _bits(other):
        yield f"{where} differs: {_short(one)} and {_short(other)}"


def _mappings(one: Mapping[Any, Any], other: Mapping[Any, Any], where: str) -> Iterator[str]:
    for key, value in one.items():
        if key in other:
            yield from differences(value, other[key], f"{where}[{key!r}]")
        else:
            yield f"{where}[{key!r}] is missing in the second"
    for key in other:
        if key not in one:
            yield f"{where}[{key!r}] is missing in the first"
    left, right = (getattr(value, "_metadata", None) for value in (one, other))
    yield from differences(left, right, f"{where}._metadata")


def _elements(one: torch.Tensor, other: torch.Tensor, where: str) -> Iterator[str]:
    if not one.numel():
        return
    rows = [t.contiguous().reshape(-1).view(torch.uint8).reshape(t.numel(), -1) for t in (one, other)]
    if torch.equal(*rows):
        return
    differ = (rows[0] != rows[1]).any(1)
    number = int(differ.to(torch.uint8).argmax())  # the first one
    index = [int(i) for i in np.unravel_index(number, tuple(one.shape))] if one.dim() else []
    left, right = (t.contiguous().reshape(-1)[number].item() for t in (one, other))
    bits = [bytes(row[number].tolist())[::-1].hex() for row in rows]
    place = f"{where} differs at {index}" if index else f"{where} differs"
    yield (
        f"{place}: {left!r} and {right!r} (bits 0x{bits[0]} and 0x{bits[1]}); "
        f"{int(differ.sum())} of {one.numel()} elements differ"
    )


def _bits(value: Any) -> Any:
    """`value`, such that equality is that of bits: a NaN equals itself, and -0.0 is not 0.0."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    return value


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}, {text[:50]}..."


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
