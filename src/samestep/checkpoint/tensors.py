"""Tensors <-> one safetensors file, streamed: no second copy of the file in memory, one pass over its bytes.

The safetensors library maps or copies whole files; here every byte also goes through a digest and, when
writing, through the injected file layer, and nothing that was read is used before the digest has matched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from samestep.checkpoint.layout import dump_json, parse_json
from samestep.errors import CheckpointCorruptError

__all__ = ["SAFETENSORS_DTYPES", "Place", "chunks_of", "read_places", "read_tensors"]

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPE_OF = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_CHUNK_BYTES = 16 << 20


def chunks_of(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of a safetensors file that holds `tensors`, piece by piece.

    Memory: one tensor at a time is copied, if it is not contiguous or not on the CPU.
    """
    # Wide types first: then every tensor is aligned, which readers that map the file rely on.
    names = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name in names:
        tensor = tensors[name]
        end = begin + tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = dump_json(header)
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        data = _bytes_of(tensors[name].detach().cpu().resolve_neg().contiguous())
        for first in range(0, len(data), _CHUNK_BYTES):
            yield data[first : first + _CHUNK_BYTES]


def read_tensors(
    read_into: Callable[[memoryview], None], num_bytes: int, wanted: Collection[str] | None, where: str
) -> dict[str, torch.Tensor]:
    """The `wanted` tensors (None: all) of a safetensors file of `num_bytes`, each in memory of its own.

    Args:
        read_into: fills a buffer with the file's next bytes.
        num_bytes: the file's size; all of it is read.
        wanted: names; those that the file lacks are left out.
        where: the file's path, for messages.

    Raises:
        CheckpointCorruptError: the file is not a well-formed safetensors file.
    """
    places = read_places(read_into, num_bytes, where)
    result: dict[str, torch.Tensor] = {}
    for place in places:
        if wanted is None or place.name in wanted:
            tensor = _empty(place, where)
            data = _bytes_of(tensor)
            read_into(data)
            if place.dtype == torch.bool and data and tensor.view(torch.uint8).max() > 1:
                raise CheckpointCorruptError(f"{where} is altered: {place.name!r} holds no bools")
            result[place.name] = tensor
        else:
            _skip(read_into, place.num_bytes)
    return result


def _empty(place: Place, where: str) -> torch.Tensor:
    try:
        return torch.empty(place.shape, dtype=place.dtype)
    except RuntimeError:  # more than there is memory for, or than strides can count
        raise CheckpointCorruptError(
            f"{where}: the tensor {place.name!r}, of shape {list(place.shape)}, cannot be made here"
        ) from None


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # in bytes, after the header
    num_bytes: int


def read_places(read_into: Callable[[memoryview], None], num_bytes: int, where: str) -> list[Place]:
    """What the header of a safetensors file of `num_bytes` describes, in the order of the file.

    Raises:
        CheckpointCorruptError: it is not a well-formed safetensors file.
    """
    length_bytes = bytearray(8)
    if num_bytes < 8:
        raise CheckpointCorruptError(f"{where} is truncated: {num_bytes} bytes are no safetensors file")
    read_into(memoryview(length_bytes))
    num_header_bytes = int.from_bytes(length_bytes, "little")
    if num_header_bytes > min(_MAX_HEADER_BYTES, num_bytes - 8):
        raise CheckpointCorruptError(
            f"{where} is truncated or altered: its header would be {num_header_bytes} bytes long"
        )
    header = bytearray(num_header_bytes)
    read_into(memoryview(header))
    return _places(bytes(header), num_bytes - 8 - num_header_bytes, where)


def _places(header: bytes, num_data_bytes: int, where: str) -> list[Place]:
    content = parse_json(header, f"the header of {where}")
    if not isinstance(content, dict):
        raise CheckpointCorruptError(f"{where} is altered: its header is not an object")
    content.pop("__metadata__", None)
    places = sorted((_place(name, value, where) for name, value in content.items()), key=_order)
    end = 0
    for place in places:
        if place.begin != end:
            raise CheckpointCorruptError(f"{where} is altered: {place.name!r} does not begin at byte {end}")
        end += place.num_bytes
    if end != num_data_bytes:
        raise CheckpointCorruptError(
            f"{where} is truncated or altered: its tensors take {end} bytes and it has {num_data_bytes}"
        )
    return places


def _order(place: Place) -> tuple[int, int]:
    return place.begin, place.num_bytes  # the empty ones first, among those that begin together


def _place(name: str, value: Any, where: str) -> Place:
    try:
        dtype, shape = _DTYPE_OF[value["dtype"]], tuple(value["shape"])
        begin, end = value["data_offsets"]
        whole = all(type(number) is int and 0 <= number < 2**62 for number in (*shape, begin, end))
        if whole and len(value) == 3 and end - begin == math.prod(shape) * dtype.itemsize:
            return Place(name, dtype, shape, begin, end - begin)
    except (KeyError, TypeError, ValueError):
        pass
    raise CheckpointCorruptError(f"{where} is altered: its header describes no tensor at {name!r}")


def _skip(read_into: Callable[[memoryview], None], num_bytes: int) -> None:
    scratch = memoryview(bytearray(min(num_bytes, _CHUNK_BYTES)))
    while num_bytes:
        piece = scratch[: min(num_bytes, _CHUNK_BYTES)]
        read_into(piece)
        num_bytes -= len(piece)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array).cast("B")
