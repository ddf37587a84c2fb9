"""Nested Python state <-> JSON and tensors, types and bits kept. Nothing else can be written or come back.

JSON holds null, booleans, strings, whole numbers, finite floats, lists, and dicts with string keys as they
are. Everything else is an object with one key that begins with "$", the tag; dicts with such a key or with
keys that are not strings are tagged themselves. docs/checkpoint-format.md lists the tags.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from samestep.checkpoint.layout import dump_json
from samestep.checkpoint.tensors import SAFETENSORS_DTYPES
from samestep.errors import CheckpointCorruptError, CheckpointError

__all__ = [
    "Reference",
    "decode",
    "decode_dtype",
    "encode",
    "references",
    "tensor_names",
]

Path = tuple[object, ...]
# What decoding an altered tree can run into; a RecursionError is a RuntimeError, and so are torch's.
_MALFORMED = (KeyError, TypeError, ValueError, RuntimeError, OverflowError, struct.error)
_PAIRED = ("$dict", "$ordered_dict", "$counter")
_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


def encode(value: object, where: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """`value` as JSON, and the tensors that it refers to by name.

    Memory: the tensors alias `value`'s. Tensors that are the same view of the same memory (tied weights)
    are one tensor, and come back as one.

    Args:
        value: nested dicts, lists, tuples, sets; None, bool, int, float, complex, str, bytes; tensors,
            numpy arrays and scalars, `torch.Size`, dtypes and devices.
        where: the entry's name, for messages.

    Raises:
        CheckpointError: it holds anything else; the message says where.
    """
    encoder = _Encoder(where)
    try:
        return encoder.encode(value, ()), encoder.tensors
    except RecursionError:
        raise CheckpointError(f"{where!r} is nested too deeply, or contains itself") from None


def decode(tree: Any, tensors: Mapping[str, torch.Tensor], where: str) -> Any:
    """The value that `encode` made `tree` and `tensors` of.

    Raises:
        CheckpointCorruptError: no value encodes to that.
    """
    try:
        return _Decoder(tensors).decode(tree)
    except _MALFORMED as error:
        raise CheckpointCorruptError(f"{where} is altered: it encodes no value ({_line(error)})") from None


@dataclass(frozen=True)
class Reference:
    """A tensor in an encoded value."""

    path: tuple[str, ...]  # keys and indices that lead to it
    name: str  # in the entry's file
    dtype: str | None = None  # where they are not those of the file
    shape: tuple[int, ...] | None = None


def references(tree: Any) -> list[Reference]:
    """All tensors that `tree` refers to, in order; `decode` refuses what makes no sense."""
    found: list[Reference] = []
    pending: list[tuple[Any, tuple[str, ...]]] = [(tree, ())]
    while pending:
        node, path = pending.pop()
        inside: list[tuple[Any, tuple[str, ...]]] = []
        if isinstance(node, dict):
            name = node.get("$tensor")
            if isinstance(name, str):
                shape = node.get("shape")
                found.append(
                    Reference(
                        path,
                        name,
                        dtype if isinstance(dtype := node.get("dtype"), str) else None,
                        tuple(shape) if isinstance(shape, list) else None,
                    )
                )
            for key, value in node.items():
                if key in _PAIRED and isinstance(value, list):
                    pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2]
                    inside += [(item, (*path, str(label))) for label, item in pairs]
                    inside += [(label, (*path, "keys")) for label, _ in pairs]
                else:
                    inside.append((value, path if key.startswith("$") else (*path, key)))
        elif isinstance(node, list):
            inside += [(item, (*path, str(index))) for index, item in enumerate(node)]
        pending += reversed(inside)
    return found


def tensor_names(tree: Any) -> set[str]:
    """The names of all tensors that `tree` refers to."""
    return {reference.name for reference in references(tree)}


class _Encoder:
    def __init__(self, where: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._where = where
        self._names: dict[tuple[object, ...], str] = {}

    def encode(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is list:
            return self._items(value, path)
        if kind is dict:
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: self.encode(item, (*path, key)) for key, item in value.items()}
            return {"$dict": self._pairs(value, path)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._numpy(value, path)
        encoders: dict[type, Callable[[Any, Path], Any]] = {
            OrderedDict: self._ordered_dict,
            Counter: lambda v, p: {"$counter": self._pairs(v, p)},
            tuple: lambda v, p: {"$tuple": self._items(v, p)},
            torch.Size: lambda v, p: {"$size": list(v)},
            set: lambda v, p: {"$set": self._unordered(v, p)},
            frozenset: lambda v, p: {"$frozenset": self._unordered(v, p)},
            bytes: lambda v, p: {"$bytes": base64.b64encode(v).decode("ascii")},
            complex: lambda v, p: {"$complex": [self.encode(v.real, p), self.encode(v.imag, p)]},
            torch.dtype: lambda v, p: {"$dtype": str(v).removeprefix("torch.")},
            torch.device: lambda v, p: {"$device": str(v)},
        }
        if kind not in encoders:
            raise self._refusal(path, f"a {kind.__module__}.{kind.__qualname__}")
        return encoders[kind](value, path)

    def _items(self, values: Iterable[Any], path: Path) -> list[Any]:
        return [self.encode(item, (*path, index)) for index, item in enumerate(values)]

    def _pairs(self, value: Mapping[Any, Any], path: Path) -> list[list[Any]]:
        return [[self.encode(k, (*path, "keys")), self.encode(v, (*path, k))] for k, v in value.items()]

    def _unordered(self, values: Iterable[Any], path: Path) -> list[Any]:
        return sorted(self._items(values, path), key=dump_json)

    def _ordered_dict(self, value: OrderedDict[Any, Any], path: Path) -> dict[str, Any]:
        tree: dict[str, Any] = {"$ordered_dict": self._pairs(value, path)}
        metadata = getattr(value, "_metadata", None)  # of nn.Module.state_dict(): versions of the modules
        if metadata is not None:
            tree["metadata"] = self.encode(metadata, (*path, "metadata"))
        return tree

    def _numpy(self, value: Any, path: Path) -> dict[str, Any]:
        tag = "$numpy" if isinstance(value, np.ndarray) else "$numpy_scalar"
        if tag == "$numpy" and type(value) is not np.ndarray:
            raise self._refusal(path, f"a {type(value).__name__}, which is not a plain numpy array")
        try:
            tensor = torch.from_numpy(np.array(value, order="C"))
        except (TypeError, ValueError):
            raise self._refusal(path, f"a numpy array of {value.dtype!r}") from None
        return {tag: self._tensor(tensor, path)}

    def _tensor(self, tensor: torch.Tensor, path: Path) -> dict[str, Any]:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise self._refusal(path, f"a {type(tensor).__name__}, which is not a plain tensor")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise self._refusal(path, f"a tensor of layout {tensor.layout} on {tensor.device}")
        tensor = tensor.detach()
        tree: dict[str, Any] = {"$tensor": ""}
        stride = list(tensor.stride())
        if not tensor.is_contiguous() and _is_dense(list(tensor.shape), stride):
            tree["stride"] = stride  # channels_last, transposed: kernels choose by it
        if tensor.dtype not in SAFETENSORS_DTYPES:
            tree |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        tree["$tensor"] = self._name_of(tensor, path)
        return tree

    def _name_of(self, tensor: torch.Tensor, path: Path) -> str:
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        identity = (*view, tensor.is_conj(), tensor.is_neg())
        if tensor.numel() and identity in self._names:
            return self._names[identity]
        name = self._free_name("/".join(map(str, path)) or "value")
        self._names[identity] = name
        if tensor.dtype not in SAFETENSORS_DTYPES:
            plain = tensor.resolve_conj().resolve_neg().contiguous()
            tensor = plain.reshape(-1).view(torch.uint8)
        self.tensors[name] = tensor
        return name

    def _free_name(self, name: str) -> str:
        if name == "__metadata__" or not name.isprintable():  # safetensors' own, or no UTF-8
            name = "tensor"
        free, number = name, 1
        while free in self.tensors:
            number += 1
            free = f"{name}~{number}"
        return free

    def _refusal(self, path: Path, what: str) -> CheckpointError:
        where = "".join(f"[{key!r}]" for key in (self._where, *path))
        return CheckpointError(
            f"state{where} is {what}: a checkpoint holds plain data (numbers, strings, tensors, dicts, "
            "lists) and no code; convert it, or leave it out"
        )


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._shared: dict[tuple[object, ...], torch.Tensor] = {}
        self._decoders: dict[str, Callable[[Any], Any]] = {
            "$float": lambda v: struct.unpack(">d", bytes.fromhex(v))[0],
            "$complex": self._complex,
            "$bytes": lambda v: base64.b64decode(v, validate=True),
            "$tuple": lambda v: tuple(self._list(v)),
            "$size": _size,
            "$set": lambda v: _all_of(v, set(self._list(v))),
            "$frozenset": lambda v: _all_of(v, frozenset(self._list(v))),
            "$dict": lambda v: _all_of(v, dict(self._pairs(v))),
            "$counter": lambda v: _all_of(v, Counter(dict(self._pairs(v)))),
            "$dtype": lambda v: _DTYPES[v],
            "$device": torch.device,
            "$numpy": lambda v: self._tensor(v).numpy().copy(),
            "$numpy_scalar": lambda v: self._tensor(v).numpy()[()],
        }

    def decode(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return self._list(tree)
        if not isinstance(tree, dict):
            return tree
        tag = next((key for key in tree if key.startswith("$")), None)
        if tag is None:
            return {key: self.decode(item) for key, item in tree.items()}
        if tag == "$tensor":
            return self._tensor(tree)
        if tag == "$ordered_dict":
            return self._ordered_dict(tree)
        if len(tree) != 1:
            raise ValueError(f"{tag} beside other keys")
        return self._decoders[tag](tree[tag])

    def _list(self, values: Any) -> list[Any]:
        if not isinstance(values, list):
            raise TypeError("a list was expected")
        return [self.decode(value) for value in values]

    def _complex(self, value: Any) -> complex:
        real, imaginary = self._list(value)
        return complex(real, imaginary)

    def _pairs(self, pairs: list[Any]) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(value)) for key, value in pairs]

    def _ordered_dict(self, tree: dict[str, Any]) -> OrderedDict[Any, Any]:
        pairs = tree["$ordered_dict"]
        result: OrderedDict[Any, Any] = _all_of(pairs, OrderedDict(self._pairs(pairs)))
        if set(tree) - {"$ordered_dict", "metadata"}:
            raise ValueError("$ordered_dict beside other keys")
        if "metadata" in tree:
            result._metadata = self.decode(tree["metadata"])  # type: ignore[attr-defined]
        return result

    def _tensor(self, tree: Any) -> torch.Tensor:
        if set(tree) - {"$tensor", "stride", "dtype", "shape"}:
            raise ValueError("$tensor beside other keys")
        identity = (tree["$tensor"], str(tree))
        if identity not in self._shared:
            self._shared[identity] = _restore(self._tensors[tree["$tensor"]], tree)
        return self._shared[identity]


def decode_dtype(name: str) -> torch.dtype:
    """The dtype called `name`; KeyError if there is none."""
    return _DTYPES[name]


def _restore(tensor: torch.Tensor, tree: dict[str, Any]) -> torch.Tensor:
    """`tensor` with the dtype, shape and strides that it had when it was saved."""
    if "dtype" in tree:
        tensor = tensor.view(_DTYPES[tree["dtype"]]).reshape(tree["shape"])
    if "stride" in tree:
        stride = tree["stride"]
        if not _is_dense(list(tensor.shape), stride):
            raise ValueError("strides that leave gaps")
        tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
    return tensor


def _is_dense(shape: list[int], stride: list[int]) -> bool:
    """Whether elements at `stride` fill their memory without gaps or overlaps."""
    if len(shape) != len(stride) or any(type(s) is not int or not 0 <= s < 2**62 for s in stride):
        return False
    expected = 1
    for step, size in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _size(lengths: Any) -> torch.Size:
    if not isinstance(lengths, list) or any(type(n) is not int or not 0 <= n < 2**62 for n in lengths):
        raise ValueError("not the lengths of dimensions")
    return torch.Size(lengths)


def _all_of(items: list[Any], collection: Any) -> Any:
    if len(collection) != len(items):
        raise ValueError("a key comes twice")
    return collection


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
