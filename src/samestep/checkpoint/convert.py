"""Checkpoints to and from other formats: `ckpt.pt` (torch.save), safetensors, torch's DCP."""

from __future__ import annotations

import os
import shutil
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.checkpoint import dcp
from samestep.checkpoint.files import Files
from samestep.checkpoint.owner import SAVING, hidden_name
from samestep.checkpoint.reader import Reader, Stream, find_checkpoint
from samestep.checkpoint.save import save
from samestep.checkpoint.scan import open_regular
from samestep.checkpoint.tensors import SAFETENSORS_DTYPES, chunks_of, read_tensors
from samestep.errors import CheckpointError

__all__ = ["FORMATS", "export_checkpoint", "import_checkpoint"]

FORMATS = ("pt", "safetensors", "dcp")
MODEL = "model"
STEP = "step"
_SUFFIXES = {".pt": "pt", ".pth": "pt", ".ckpt": "pt", ".safetensors": "safetensors", "": "dcp"}


def export_checkpoint(path: Path, target: Path, *, kind: str | None = None, entry: str = MODEL) -> None:
    """`target` holds what the checkpoint at `path` does, in another format; it appears whole or not at all.

    - "pt": one dict with the entries and "step", for `torch.load(target, weights_only=True)`.
    - "safetensors": the tensors of one entry. Tied tensors are there under each of their names.
    - "dcp": a directory for `torch.distributed.checkpoint`, with the entries and "step".

    Args:
        path: a checkpoint, or a directory of checkpoints, of which the latest is taken.
        target: a new file or directory.
        kind: one of `FORMATS`. Default: by `target`'s suffix (.pt, .pth, .ckpt; .safetensors; none: dcp).
        entry: which entry a safetensors file holds.

    Raises:
        CheckpointError: there is something at `target`, or the format cannot hold the state.
    """
    kind = _kind_of(target, kind)
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} is there already: choose another name, or remove it first")
    reader = Reader(find_checkpoint(path))
    reader.open()
    if kind == "safetensors" and entry not in reader.entries:
        raise CheckpointError(
            f"{reader.path} has no entry {entry!r}: it holds {', '.join(map(repr, reader.entries))}"
        )
    values = reader.read([entry] if kind == "safetensors" else list(reader.entries))
    part = target.with_name(hidden_name(SAVING, target.name))
    try:
        if kind == "safetensors":
            _write_safetensors(part, values[entry], entry)
        else:
            whole = {STEP: reader.step, **{name: _plain(value) for name, value in values.items()}}
            if kind == "pt":
                _write_pt(part, whole)
            else:
                dcp.write(part, whole)
        part.rename(target)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


def import_checkpoint(
    source: Path, directory: Path, *, kind: str | None = None, step: int | None = None
) -> Path:
    """The checkpoint, one more in `directory`, that holds what `source` does.

    A file of one flat dict of tensors (a model's `state_dict()`, or safetensors) becomes the entry "model";
    else each key at the top becomes an entry. Nothing is unpickled but by torch's reader of plain data.

    Args:
        source: a file of torch.save or safetensors, or a DCP directory.
        directory: of checkpoints.
        kind: one of `FORMATS`. Default: by `source`'s suffix.
        step: the number of optimizer steps done. Default: the number under "step" in `source`, else 0.

    Raises:
        CheckpointError: `source` cannot be read, or holds what a checkpoint cannot.
    """
    kind = _kind_of(source, kind)
    if not source.exists():
        raise CheckpointError(f"there is nothing at {source}: check the path")
    if kind == "dcp":
        state = dcp.read(source)
    elif kind == "pt":
        state = _read_pt(source)
    else:
        with Stream(source) as stream:
            state = read_tensors(stream.read_into, stream.num_bytes, None, str(source))
    if kind == "safetensors" or all(isinstance(value, torch.Tensor) for value in state.values()):
        state = {MODEL: state}
    found = state.get(STEP)
    if isinstance(found, int) and not isinstance(found, bool):
        state = {name: value for name, value in state.items() if name != STEP}
        step = found if step is None else step
    return save(directory, state, step=step or 0, keep=None, random_states=False)


def _kind_of(path: Path, kind: str | None) -> str:
    kind = kind or _SUFFIXES.get(path.suffix)
    if kind is None and path.is_dir():
        kind = "dcp"
    if kind not in FORMATS:
        raise CheckpointError(
            f"{path}: its suffix names no format; end it in .pt or .safetensors, or say which of "
            f"{', '.join(FORMATS)} it is"
        )
    return kind


def _write_pt(path: Path, whole: dict[str, Any]) -> None:
    torch.save(whole, path)
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"the state holds what torch.load(weights_only=True) does not take: {_line(error)}"
        ) from None


def _read_pt(path: Path) -> dict[str, Any]:
    try:
        descriptor, _ = open_regular(path.resolve())  # a pipe would keep us waiting
        with os.fdopen(descriptor, "rb") as file:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # whatever a stranger's file makes torch's reader do
        raise CheckpointError(
            f"{path} is not a file of torch.save that holds plain data alone: {_line(error)}"
        ) from None
    if not isinstance(state, dict) or not state or not all(isinstance(key, str) for key in state):
        raise CheckpointError(f"{path} holds a {type(state).__name__}: a dict with names as keys is needed")
    return state


def _write_safetensors(path: Path, value: Any, entry: str) -> None:
    tensors = dict(_tensors_in(value, ()))
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFETENSORS_DTYPES:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(f"safetensors has no {dtype}, the dtype of {name!r} in {entry!r}")
    if not tensors:
        raise CheckpointError(f"the entry {entry!r} holds no tensors")
    files = Files()
    with files.create(path) as file:
        for chunk in chunks_of(tensors):
            files.write(file, chunk)
        files.sync(file)


def _tensors_in(value: Any, path: tuple[str, ...]) -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [("/".join(path) or "value", value)]
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    return [found for key, item in items for found in _tensors_in(item, (*path, str(key)))]


def _plain(value: Any) -> Any:
    """`value` without the types that torch's reader of plain data refuses: numpy's and frozen sets."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, frozenset):
        return set(value)
    if isinstance(value, (OrderedDict, dict)) and not isinstance(value, Counter):
        plain = type(value)((key, _plain(item)) for key, item in value.items())
        if hasattr(value, "_metadata"):
            plain._metadata = value._metadata  # type: ignore[attr-defined]
        return plain
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # torch's first line says that it failed, with advice to trust the file; why comes later.
    reason = next((line for line in lines if "Unsupported" in line or "WeightsUnpickler" in line), lines[0])
    return f"{type(error).__name__}: {reason}".replace(os.linesep, " ")[:300]
