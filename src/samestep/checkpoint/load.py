"""`load`: everything that was saved is verified first, and only then put into the objects."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from samestep.checkpoint import entries
from samestep.checkpoint import random_states as streams
from samestep.checkpoint.agreement import agreed, group_or_world
from samestep.checkpoint.encoding import decode, tensor_names
from samestep.checkpoint.layout import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    STATE,
    FileRecord,
    Manifest,
    parse_json,
)
from samestep.checkpoint.same_bits import fixed_virtual_size, same_bits_notes
from samestep.checkpoint.scan import latest_in, open_regular
from samestep.checkpoint.tensors import read_tensors
from samestep.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

__all__ = ["Loaded", "load"]

_ADVICE = "load another checkpoint of the run"


@dataclass(frozen=True)
class Loaded:
    """What `load` found beside the states that it put into objects."""

    path: Path
    step: int
    world_size: int  # of the run that saved it
    values: Mapping[str, Any] = field(repr=False)  # of the names asked for whose objects take no state
    skipped: tuple[str, ...] = ()  # in the checkpoint and not asked for, or, unless strict, the reverse
    notes: tuple[str, ...] = ()  # what is not as it was, such as random streams


def load(
    path: str | os.PathLike[str],
    state: Mapping[str, object],
    *,
    process_group: dist.ProcessGroup | None = None,
    random_states: bool = True,
    strict: bool = True,
) -> Loaded:
    """The objects in `state` are as they were when the checkpoint was saved, on any number of ranks.

    All that is needed is read, and its sizes and digests are compared with the manifest, before anything
    is put into any object: after an error here the model and the optimizer are as they were. Nothing is
    ever unpickled: a checkpoint from a stranger cannot run code.

    Ranks: all of the group; each reads the files itself, so every host must see them.

    Memory: on each rank, one copy of the tensors that are asked for, until it returns.

    Args:
        path: a checkpoint, or a directory of checkpoints, of which the latest is taken.
        state: names as for `save` -> objects with `load_state_dict()`. A plain value under a name asks
            for the saved one, which `Loaded.values` then holds. Names not asked for are not read.
        process_group: the ranks that load together. Default: the world.
        random_states: each rank's random streams go on as saved. In a world of another size they cannot:
            they are seeded anew from the saved ones, with a warning and a note.
        strict: False lets names, a model's tensors among them, be missing on either side, and a model's
            dtypes differ. Shapes must always fit.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `path`.
        CheckpointCorruptError: a file is missing, truncated, altered or not what it should be.
        CheckpointError: the checkpoint is not of these objects. All of these are the same on every rank.
    """
    group = group_or_world(process_group)
    rank, world_size = (0, 1) if group is None else (group.rank(), group.size())
    found: str = agreed(lambda: str(_find(Path(path))) if rank == 0 else None, group)[0]
    reader = _Reader(Path(found))
    saved: dict[str, Any] = {}

    def read() -> None:
        reader.open()
        saved.update(reader.read(_names_to_read(reader, state, strict=strict)))
        for name, value in saved.items():
            if entries.is_loadable(state[name]):
                entries.check_fit(name, state[name], value, strict=strict)
        if random_states:
            reader.read_random()

    def put() -> list[str]:
        loadable = [name for name in saved if entries.is_loadable(state[name])]
        for name in sorted(loadable, key=lambda name: entries.order_of_applying(state[name])):
            entries.apply(name, state[name], saved[name], strict=strict)
        notes = [
            note
            for name in loadable
            for note in entries.follow_buckets(name, state[name], reader.entries[name].get("buckets"))
        ]
        size = fixed_virtual_size(process_group)
        if random_states:
            notes += _restore_random(reader, rank, world_size, is_fixed=size is not None)
        return notes + same_bits_notes(reader.written_by, size, str(reader.path))

    agreed(read, group)
    notes = agreed(put, group)[rank]
    for note in notes:
        if rank == 0:
            warnings.warn(note, RuntimeWarning, stacklevel=2)
    return Loaded(
        path=reader.path,
        step=reader.step,
        world_size=reader.world_size,
        values={name: value for name, value in saved.items() if not entries.is_loadable(state[name])},
        skipped=tuple(sorted(set(reader.entries) ^ set(state))),
        notes=tuple(notes),
    )


def _find(path: Path) -> Path:
    if (path / MANIFEST).is_file():
        return path
    if path.is_dir():
        found = latest_in(path)
        if found is not None:
            return found
        raise CheckpointNotFoundError(
            f"{path} is not a checkpoint (it has no {MANIFEST}) and holds none: give the directory that "
            "samestep.checkpoint.save wrote to, or start without a checkpoint"
        )
    if path.exists():
        raise CheckpointError(
            f"{path} is a file and a checkpoint is a directory: give the directory, or, if torch.save wrote "
            "it, read it with torch.load(..., weights_only=True)"
        )
    raise CheckpointNotFoundError(f"there is no checkpoint at {path}: check the path, or start without one")


def _names_to_read(reader: _Reader, state: Mapping[str, object], *, strict: bool) -> list[str]:
    missing = [name for name in state if name not in reader.entries]
    if missing and strict:
        raise CheckpointError(
            f"{reader.path} has no {', '.join(map(repr, missing))}: it holds "
            f"{', '.join(map(repr, reader.entries)) or 'nothing'}. Ask for these, or load with strict=False"
        )
    return [name for name in state if name in reader.entries]


def _restore_random(reader: _Reader, rank: int, world_size: int, *, is_fixed: bool) -> list[str]:
    states = reader.random
    if states is None:
        return [f"{reader.path} holds no random states: the random streams were left as they are"]
    if is_fixed and all(state.digest == states[0].digest for state in states):
        # Outside of their virtual ranks' turns all ranks drew alike, and so does any other number of them.
        return streams.restore(states[0])
    if len(states) != world_size:
        streams.seed_anew(states, rank, world_size)
        return [
            f"{reader.path} was saved by {len(states)} ranks and is loaded by {world_size}: each rank's "
            "random streams are new, seeded from the saved ones"
        ]
    return streams.restore(states[rank])


class _Reader:
    """One checkpoint, verified as it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.step = -1
        self.world_size = -1
        self.entries: dict[str, Any] = {}
        self.written_by: Any = None
        self.random: list[streams.RandomStates] | None = None
        self._random_file: str | None = None
        self._manifest = Manifest({})

    def open(self) -> None:
        where = str(self.path / MANIFEST)
        with _Stream(self.path / MANIFEST) as stream:
            if stream.num_bytes > MAX_MANIFEST_BYTES:
                raise CheckpointCorruptError(f"{where} is altered: {stream.num_bytes} bytes are no manifest")
            self._manifest = Manifest.from_json(stream.read(), where)
        state = self._json(STATE)
        try:
            self.step, self.world_size = state["step"], state["world_size"]
            self.entries, self._random_file = state["entries"], state["random"]
            self.written_by = state.get("written_by")
            numbers = type(self.step) is int and type(self.world_size) is int
            complete = all("value" in entry for entry in self.entries.values())
            named = [self._random_file, *(entry["tensors"] for entry in self.entries.values())]
            listed = all(map(self._is_listed, named))
        except (KeyError, TypeError, AttributeError):
            numbers = complete = listed = False
        if not (numbers and complete and listed):
            raise self._altered(STATE, "it does not describe a checkpoint's entries")

    def _is_listed(self, file_name: Any) -> bool:
        return file_name is None or (isinstance(file_name, str) and file_name in self._files)

    def read(self, names: list[str]) -> dict[str, Any]:
        """The values of the entries `names`."""
        return {name: self._entry(name) for name in names}

    def read_random(self) -> None:
        """`random` is each rank's random states, if any were saved."""
        if self._random_file is not None:
            states = self._json(self._random_file)
            if not isinstance(states, list) or len(states) != self.world_size:
                raise self._altered(self._random_file, f"it is not a list of {self.world_size} ranks' states")
            self.random = [streams.parse(state, str(self.path / self._random_file)) for state in states]

    @property
    def _files(self) -> Mapping[str, FileRecord]:
        return self._manifest.files

    def _entry(self, name: str) -> Any:
        tree, file_name = self.entries[name]["value"], self.entries[name]["tensors"]
        wanted = tensor_names(tree)
        tensors = {} if file_name is None else self._tensors(file_name, wanted)
        absent = sorted(wanted - set(tensors))
        if absent:
            where = file_name or STATE
            raise self._altered(where, f"it lacks {len(absent)} tensors of {name!r}, the first: {absent[0]}")
        return decode(tree, tensors, f"{name!r} in {self.path / STATE}")

    def _tensors(self, file_name: str, wanted: Collection[str]) -> dict[str, torch.Tensor]:
        path = self.path / file_name
        with self._verified(file_name) as stream:
            tensors = read_tensors(stream.read_into, stream.num_bytes, wanted, str(path))
            stream.check_digest(self._files[file_name])
        return tensors

    def _json(self, file_name: str) -> Any:
        with self._verified(file_name) as stream:
            data = stream.read()
            stream.check_digest(self._files[file_name])
        return parse_json(data, str(self.path / file_name))

    def _verified(self, file_name: str) -> _Stream:
        stream = _Stream(self.path / file_name)
        expected = self._files[file_name].num_bytes
        if stream.num_bytes != expected:
            stream.close()
            what = "truncated" if stream.num_bytes < expected else "altered"
            raise CheckpointCorruptError(
                f"{stream.path} is {what}: it has {stream.num_bytes} bytes and was saved with {expected}; "
                f"{_ADVICE}"
            )
        return stream

    def _altered(self, file_name: str, why: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(f"{self.path / file_name} is altered: {why}; {_ADVICE}")


class _Stream:
    """A checkpoint's file, read once from front to back through a digest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = hashlib.sha256()
        try:
            descriptor, self.num_bytes = open_regular(path)
        except FileNotFoundError:
            raise CheckpointCorruptError(f"{path} is missing; {_ADVICE}") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        self._file = os.fdopen(descriptor, "rb", buffering=0)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def read(self) -> bytes:
        data = bytearray(self.num_bytes)
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, buffer: memoryview) -> None:
        rest = buffer
        while rest:
            try:
                count = self._file.readinto(rest)
            except OSError as error:
                raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error
            if not count:
                raise CheckpointCorruptError(f"{self.path} is truncated; {_ADVICE}")
            rest = rest[count:]
        self._digest.update(buffer)

    def check_digest(self, record: FileRecord) -> None:
        if self._digest.hexdigest() != record.sha256:
            raise CheckpointCorruptError(
                f"{self.path} is altered: its bytes are not those that were saved (sha256 differs); {_ADVICE}"
            )
