"""torch's distributed checkpoints (DCP) as one plain state, without running what their index could carry.

A DCP directory holds `.metadata`, a pickle of records that say where each tensor's chunks lie, and data
files. torch unpickles the index as it is. Here it goes through an interpreter that knows the records' names
and nothing else: it makes inert ones of them, and any other name is refused.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.encoding import decode_dtype
from samestep.checkpoint.scan import open_regular
from samestep.errors import CheckpointCorruptError, CheckpointError

__all__ = ["read", "write"]

METADATA = ".metadata"
_MAX_METADATA_BYTES = 256 << 20
_HOME = "torch.distributed.checkpoint."
_RECORDS = {
    (_HOME + "metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    (_HOME + "filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),  # where it was saved; not looked at
    ("pathlib._local", "PosixPath"),
}


def write(path: Path, state: Mapping[str, Any]) -> None:
    """`state` is a DCP checkpoint, the directory `path`."""
    import torch.distributed.checkpoint as torch_dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        torch_dcp.save(dict(state), checkpoint_id=str(path), no_dist=True)


def read(path: Path) -> dict[str, Any]:
    """The state in the DCP checkpoint `path`, tensors whole, nested as it was saved.

    Raises:
        CheckpointError: it is none, or holds more than plain data.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory, as DCP's checkpoints are")
    index = _read_metadata(path / METADATA)
    try:
        entries: dict[str, Any] = index.state_dict_metadata
        places = {(key.fqn, _offset(key)): info for key, info in index.storage_data.items()}
        paths: dict[str, Any] = index.planner_data if isinstance(index.planner_data, dict) else {}
        state: dict[str, Any] = {}
        for name, entry in entries.items():
            if entry.kind == "TensorStorageMetadata":
                value = _tensor(path, name, entry, places)
            else:
                value = _load_slice(path, places[name, None], name)
            _put(state, paths.get(name, (name,)), value)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointCorruptError(
            f"{path / METADATA} describes no state ({type(error).__name__}: {str(error)[:100]})"
        ) from None
    return {name: _with_numbers(value) for name, value in state.items()}


def _with_numbers(value: Any) -> Any:
    """An optimizer's state, whose parameters have numbers: DCP makes text of all keys."""
    if (
        isinstance(value, dict)
        and {"state", "param_groups"} <= set(value)
        and isinstance(value["state"], dict)
    ):
        state = {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in value["state"].items()}
        return {**value, "state": state}
    return value


class _Record:
    """A record of DCP's index, with no behaviour."""

    kind = ""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state

    def __hash__(self) -> int:
        return id(self)


class _Unpickler(pickle._Unpickler):  # in Python: no memory that it says it needs
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return type(name, (_Record,), {"kind": name})
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch":
            return decode_dtype(name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _read_metadata(path: Path) -> Any:
    try:
        descriptor, num_bytes = open_regular(path)
        with os.fdopen(descriptor, "rb") as file:
            if num_bytes > _MAX_METADATA_BYTES:
                raise CheckpointCorruptError(f"{path} is too large for an index: {num_bytes} bytes")
            data = file.read()
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is not a DCP checkpoint: it has no {METADATA}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # any bytes may be there
        raise CheckpointCorruptError(
            f"{path} is not an index of DCP's alone: {type(error).__name__}: {str(error)[:100]}"
        ) from None


def _offset(key: Any) -> tuple[int, ...] | None:
    offset = getattr(key, "offset", None)
    return None if offset is None else tuple(offset)


def _tensor(path: Path, name: str, entry: Any, places: Mapping[Any, Any]) -> torch.Tensor:
    size = tuple(entry.size)
    covered = 0
    whole: torch.Tensor | None = None
    for chunk in entry.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        piece = _load_slice(path, places[name, offsets], name)
        if not isinstance(piece, torch.Tensor) or tuple(piece.shape) != sizes:
            raise ValueError(f"{name} has a chunk of another shape")
        if len(entry.chunks) == 1 and sizes == size:
            return piece
        whole = torch.empty(size, dtype=piece.dtype) if whole is None else whole
        if piece.dtype != whole.dtype or len(offsets) != len(size):
            raise ValueError(f"{name} has chunks that do not fit together")
        target = whole
        for dimension, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
            target = target.narrow(dimension, start, length)
        target.copy_(piece)
        covered += piece.numel()
    if whole is None or covered != whole.numel():
        raise ValueError(f"{name} is not covered by its chunks")
    return whole


def _load_slice(path: Path, info: Any, name: str) -> Any:
    file_name, offset, length = info.relative_path, info.offset, info.length
    if not isinstance(file_name, str) or Path(file_name).name != file_name or file_name in ("", ".", ".."):
        raise CheckpointCorruptError(f"{path} keeps {name!r} outside of its directory")
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"{path} was written with transforms: {info.transform_descriptors}")
    try:
        descriptor, num_bytes = open_regular(path / file_name)
        with os.fdopen(descriptor, "rb") as file:
            if (
                type(offset) is not int
                or type(length) is not int
                or not 0 <= offset <= offset + length <= num_bytes
            ):
                raise CheckpointCorruptError(f"{path / file_name} is truncated")
            file.seek(offset)
            data = file.read(length)
    except OSError as error:
        raise CheckpointCorruptError(f"cannot read {path / file_name}: {error.strerror}") from error
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} holds under {name!r} what is not plain data ({type(error).__name__})"
        ) from None


def _put(state: dict[str, Any], path: Any, value: Any) -> None:
    """`state[path[0]][path[1]]... = value`; numbers in a path are the places in a list."""
    node: Any = state
    for key, following in itertools.pairwise(path):
        node = _child(node, key, [] if isinstance(following, int) else {})
    if isinstance(node, list):
        _child(node, path[-1], None)
        node[path[-1]] = value
    else:
        node[path[-1]] = value


def _child(node: Any, key: Any, empty: Any) -> Any:
    if isinstance(node, dict):
        return node.setdefault(key, empty)
    if type(key) is not int or not 0 <= key <= len(node) + 100_000:
        raise ValueError(f"a list has no place {key!r}")
    node.extend([None] * (key + 1 - len(node)))
    if node[key] is None:
        node[key] = empty
    return node[key]
