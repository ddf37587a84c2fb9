"""One checkpoint, verified as it is read: sizes and digests first, then what the bytes say."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint import random_states as streams
from samestep.checkpoint.encoding import decode, tensor_names
from samestep.checkpoint.layout import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    STATE,
    FileRecord,
    Manifest,
    check_entry_names,
    parse_json,
)
from samestep.checkpoint.scan import latest_in, open_regular
from samestep.checkpoint.tensors import read_places, read_tensors
from samestep.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

__all__ = ["Reader", "Stream", "find_checkpoint"]

_TOO_LARGE = 10**18  # names of checkpoints have 18 digits at most
ADVICE = "load another checkpoint of the run"


def find_checkpoint(path: Path) -> Path:
    """`path` if it is a checkpoint, else the latest one in it.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointError: `path` is a file.
    """
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


class Reader:
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
        with Stream(self.path / MANIFEST) as stream:
            if stream.num_bytes > MAX_MANIFEST_BYTES:
                raise CheckpointCorruptError(f"{where} is altered: {stream.num_bytes} bytes are no manifest")
            self._manifest = Manifest.from_json(stream.read(), where)
        state = self._json(STATE)
        try:
            self.step, self.world_size = state["step"], state["world_size"]
            self.entries, self._random_file = state["entries"], state["random"]
            self.written_by = state.get("written_by")
            numbers = _is_number(self.step, 0) and _is_number(self.world_size, 1)
            complete = all("value" in entry for entry in self.entries.values())
            named = [self._random_file, *(entry["tensors"] for entry in self.entries.values())]
            listed = all(map(self._is_listed, named))
        except (KeyError, TypeError, AttributeError):
            numbers = complete = listed = False
        if not (numbers and complete and listed):
            raise self._altered(STATE, "it does not describe a checkpoint's entries")
        try:
            check_entry_names(list(self.entries))
        except CheckpointError as error:
            raise self._altered(STATE, str(error)) from None

    def _is_listed(self, file_name: Any) -> bool:
        return file_name is None or (isinstance(file_name, str) and file_name in self.files)

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
    def files(self) -> Mapping[str, FileRecord]:
        """What the manifest lists."""
        return self._manifest.files

    def places(self, name: str) -> dict[str, tuple[str, list[int], int]]:
        """Dtype, shape and bytes of each tensor of the entry `name`, from the headers alone."""
        file_name = self.entries[name]["tensors"]
        if file_name is None:
            return {}
        with self._verified(file_name) as stream:
            places = read_places(stream.read_into, stream.num_bytes, str(stream.path))
        return {
            place.name: (str(place.dtype).removeprefix("torch."), list(place.shape), place.num_bytes)
            for place in places
        }

    def check_other_files(self) -> None:
        """Compare the digests of files that belong to no entry."""
        known = {STATE, self._random_file, *(entry["tensors"] for entry in self.entries.values())}
        for file_name in sorted(set(self.files) - known):
            self.check_file(file_name)

    def check_file(self, file_name: str) -> None:
        """Compare the digest of one file; nothing of it is kept."""
        with self._verified(file_name) as stream:
            stream.skip()
            stream.check_digest(self.files[file_name])

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
            stream.check_digest(self.files[file_name])
        return tensors

    def _json(self, file_name: str) -> Any:
        with self._verified(file_name) as stream:
            data = stream.read()
            stream.check_digest(self.files[file_name])
        return parse_json(data, str(self.path / file_name))

    def _verified(self, file_name: str) -> Stream:
        stream = Stream(self.path / file_name)
        expected = self.files[file_name].num_bytes
        if stream.num_bytes != expected:
            stream.close()
            what = "truncated" if stream.num_bytes < expected else "altered"
            raise CheckpointCorruptError(
                f"{stream.path} is {what}: it has {stream.num_bytes} bytes and was saved with {expected}; "
                f"{ADVICE}"
            )
        return stream

    def _altered(self, file_name: str, why: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(f"{self.path / file_name} is altered: {why}; {ADVICE}")


def _is_number(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < _TOO_LARGE


class Stream:
    """A checkpoint's file, read once from front to back through a digest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = hashlib.sha256()
        try:
            descriptor, self.num_bytes = open_regular(path)
        except FileNotFoundError:
            raise CheckpointCorruptError(f"{path} is missing; {ADVICE}") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        self._file = os.fdopen(descriptor, "rb", buffering=0)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def read(self) -> bytes:
        try:
            data = bytearray(self.num_bytes)
        except MemoryError:
            raise CheckpointCorruptError(
                f"{self.path}: {self.num_bytes} bytes do not fit in memory"
            ) from None
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
                raise CheckpointCorruptError(f"{self.path} is truncated; {ADVICE}")
            rest = rest[count:]
        self._digest.update(buffer)

    def skip(self) -> None:
        """Read all of it, for the digest alone."""
        scratch = memoryview(bytearray(min(self.num_bytes, 1 << 20)))
        left = self.num_bytes
        while left:
            piece = scratch[: min(left, len(scratch))]
            self.read_into(piece)
            left -= len(piece)

    def check_digest(self, record: FileRecord) -> None:
        if self._digest.hexdigest() != record.sha256:
            raise CheckpointCorruptError(
                f"{self.path} is altered: its bytes are not those that were saved (sha256 differs); {ADVICE}"
            )
