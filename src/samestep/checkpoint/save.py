"""`save`: rank 0 writes a checkpoint that appears whole or not at all.

[Note: Atomic write] Everything is written into a hidden directory beside the checkpoints, under a name that
nobody else uses. Each file is synced, then the directory, and only then it is renamed, which is one step
for everyone who looks, and the parent is synced, so that the new name survives a loss of power too.
Whatever was there before is removed after that. So at every moment the newest name in sight is whole.
"""

from __future__ import annotations

import errno
import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from samestep.arithmetic import arithmetic_of_this_process
from samestep.checkpoint import random_states as streams
from samestep.checkpoint.agreement import agreed, group_or_world
from samestep.checkpoint.encoding import encode
from samestep.checkpoint.entries import buckets_of, capture
from samestep.checkpoint.files import Files
from samestep.checkpoint.layout import (
    MANIFEST,
    RANDOM,
    STATE,
    CheckpointName,
    FileRecord,
    Manifest,
    check_entry_names,
    dump_json,
    tensors_file,
)
from samestep.checkpoint.owner import HIDDEN_PREFIXES, REMOVING, SAVING, hidden_name, is_abandoned
from samestep.checkpoint.same_bits import fixed_virtual_size
from samestep.checkpoint.scan import checkpoints_in
from samestep.checkpoint.tensors import chunks_of
from samestep.errors import CheckpointError

__all__ = ["save"]

_MAX_STEP = 10**18 - 1


def save(
    directory: str | os.PathLike[str],
    state: Mapping[str, object],
    *,
    step: int,
    keep: int | None = 3,
    process_group: dist.ProcessGroup | None = None,
    random_states: bool = True,
    files: Files | None = None,
) -> Path:
    """A checkpoint of `state` is on the disk, whole, at the path that every rank returns.

    Whatever happens in between (a failure, `kill -9`, a loss of power), the checkpoints that were there
    before stay as they are, and half of the new one is never seen. Saving a step again puts the new
    checkpoint beside the old one, as `step-000000042.2`, and then removes the old one.

    Nothing is pickled: the files are safetensors and JSON, so a checkpoint cannot carry code. A wrapped
    model is saved under its own names, without `module.`, and loads into a wrapped or a bare one.

    Ranks: all, with the same `step` and the same names. Rank 0 alone writes; the others wait for it, up
    to the group's time-out. Each calls its objects' `state_dict()`, in the order of `state`.

    Memory: rank 0 copies one tensor at a time.

    Args:
        directory: holds the checkpoints of one run; made if missing. One file system, seen by all ranks
            that will load.
        state: names -> objects with `state_dict()` (model, optimizer, scheduler, sampler, GradScaler),
            or plain values: numbers, strings, tensors, numpy arrays, and dicts, lists, tuples and sets
            of them. Each name names a file.
        step: the number of optimizer steps done; checkpoints sort by it.
        keep: how many checkpoints to keep, this one and those of the highest steps; None: all.
        process_group: the ranks that save together. Default: the world.
        random_states: also save each rank's random streams (torch's, numpy's, Python's).
        files: the file operations, for tests.

    Returns:
        The path of the checkpoint, a directory.

    Raises:
        CheckpointError: the same on every rank: the state holds something that cannot be saved, ranks
            disagree, or the disk is full, not writable or failing.
    """
    group = group_or_world(process_group)
    is_writer = group is None or group.rank() == 0
    contents: dict[str, Iterable[memoryview]] = {}

    def prepare() -> dict[str, Any]:
        _check_arguments(state, step, keep)
        captured = {name: capture(value) for name, value in state.items()}
        if is_writer:
            world_size = 1 if group is None else group.size()
            buckets = {name: buckets_of(value) for name, value in state.items()}
            contents.update(
                _contents(
                    captured,
                    buckets,
                    step,
                    world_size,
                    fixed_virtual_size(process_group),
                    random_states=random_states,
                )
            )
        return {
            "step": step,
            "names": sorted(state),
            "random_states": random_states,
            "random": streams.collect() if random_states else None,
        }

    def write() -> str | None:
        if not is_writer:
            return None
        return str(_write(Path(directory), step, contents, keep, files or Files()))

    ranks = agreed(prepare, group)
    _check_equal(ranks)
    if random_states:
        contents[RANDOM] = [memoryview(dump_json([rank["random"] for rank in ranks]))]
    path: str = agreed(write, group)[0]
    return Path(path)


def _check_arguments(state: Mapping[str, object], step: int, keep: int | None) -> None:
    if type(step) is not int or not 0 <= step <= _MAX_STEP:
        raise CheckpointError(f"step={step!r} is not a whole number from 0")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise CheckpointError(f"keep={keep!r}: keep at least 1 checkpoint, or all with keep=None")
    check_entry_names(list(state))


def _check_equal(ranks: list[dict[str, Any]]) -> None:
    for key in ("step", "names", "random_states"):
        for rank, other in enumerate(ranks):
            if other[key] != ranks[0][key]:
                raise CheckpointError(
                    f"rank {rank} saves {key} {other[key]}, and rank 0 {key} {ranks[0][key]}: all ranks must "
                    "save the same"
                )


def _contents(
    captured: Mapping[str, object],
    buckets: Mapping[str, list[list[str]] | None],
    step: int,
    world_size: int,
    virtual_size: int | None,
    *,
    random_states: bool,
) -> dict[str, Iterable[memoryview]]:
    """The bytes of each file but the manifest, made when they are asked for."""
    contents: dict[str, Iterable[memoryview]] = {}
    entries: dict[str, Any] = {}
    for name, value in captured.items():
        tree, tensors = encode(value, name)
        entries[name] = {"value": tree, "tensors": tensors_file(name) if tensors else None}
        if buckets[name] is not None:
            entries[name]["buckets"] = buckets[name]
        if tensors:
            contents[tensors_file(name)] = chunks_of(tensors)
    written_by = {**arithmetic_of_this_process(), "virtual_size": virtual_size}
    state = {
        "step": step,
        "world_size": world_size,
        "written_by": written_by,
        "random": RANDOM if random_states else None,
        "entries": entries,
    }
    try:
        contents[STATE] = [memoryview(dump_json(state))]
    except ValueError as error:  # a whole number of thousands of digits
        raise CheckpointError(f"the state cannot be written as JSON: {error}") from None
    return contents


def _write(
    directory: Path, step: int, contents: Mapping[str, Iterable[memoryview]], keep: int | None, files: Files
) -> Path:
    try:
        _make_directories(directory, files)
        _remove_abandoned(directory, files)
        hidden = directory / hidden_name(SAVING, CheckpointName(step))
        try:
            files.make_directory(hidden)
            records = {name: _write_file(hidden / name, chunks, files) for name, chunks in contents.items()}
            _write_file(hidden / MANIFEST, [memoryview(Manifest(records).to_json())], files)
            files.sync_directory(hidden)
            path = _reveal(hidden, directory, step, files)
        except BaseException:
            with suppress(OSError):
                files.remove_tree(hidden)
            raise
        files.sync_directory(directory)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint of step {step} in {directory}: {error.strerror or error}"
            f"{f' ({error.filename})' if error.filename else ''}; the checkpoints before it are untouched. "
            f"{_advice(error)}"
        ) from error
    _remove_old(directory, path, keep, files)
    return path


def _make_directories(directory: Path, files: Files) -> None:
    for missing in reversed([path for path in (directory, *directory.parents) if not path.exists()]):
        with suppress(FileExistsError):  # another writer was faster
            files.make_directory(missing)
        files.sync_directory(missing.parent)
    if not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is a file, not a directory", str(directory))


def _write_file(path: Path, chunks: Iterable[memoryview], files: Files) -> FileRecord:
    digest = hashlib.sha256()
    num_bytes = 0
    with files.create(path) as file:
        for chunk in chunks:
            digest.update(chunk)
            num_bytes += len(chunk)
            files.write(file, chunk)
        files.sync(file)
    return FileRecord(num_bytes, digest.hexdigest())


def _reveal(hidden: Path, directory: Path, step: int, files: Files) -> Path:
    """Give the finished directory the first free name of its step."""
    taken = [name.revision for name in _names_in(directory) if name.step == step]
    revision = max(taken, default=0) + 1
    while True:
        path = directory / str(CheckpointName(step, revision))
        # A directory with content or a file is never replaced; one that another writer put there just now
        # makes the rename fail.
        try:
            files.rename(hidden, path)
            return path
        except OSError:
            if not path.exists():
                raise
            revision += 1


def _names_in(directory: Path) -> Iterator[CheckpointName]:
    for entry in directory.iterdir():
        name = CheckpointName.parse(entry.name)
        if name is not None:
            yield name


def _remove_old(directory: Path, written: Path, keep: int | None, files: Files) -> None:
    """Of the whole checkpoints, keep `written`, and of the other steps the last ones up to `keep` in all."""
    own = CheckpointName.parse(written.name)
    assert own is not None
    try:
        newest: dict[int, CheckpointName] = {}
        names = sorted(name for name, _ in checkpoints_in(directory))
        for name in names:
            newest[name.step] = name
        newest.pop(own.step, None)
        others = sorted(newest.values())
        kept = set(others if keep is None else others[max(0, len(others) - keep + 1) :])
        # A later revision of the own step is another writer's; it is not ours to remove.
        for name in names:
            if name not in kept and name != own and not (name.step == own.step and name > own):
                _remove(directory / str(name), files)
    except (OSError, CheckpointError) as error:
        warnings.warn(
            f"the checkpoint {written} is saved, but an older one could not be removed: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


def _remove(path: Path, files: Files) -> None:
    """Take `path` out of sight in one step first: half a checkpoint must not be found under its name."""
    hidden = path.parent / hidden_name(REMOVING, path.name)
    try:
        files.rename(path, hidden)
    except FileNotFoundError:
        return  # another writer was faster
    files.remove_tree(hidden)


def _remove_abandoned(directory: Path, files: Files) -> None:
    for entry in directory.iterdir():
        if entry.name.startswith(HIDDEN_PREFIXES):
            with suppress(FileNotFoundError):  # another writer was faster
                if is_abandoned(entry):
                    files.remove_tree(entry)


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free some space, or keep fewer checkpoints"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return "Choose a directory that this user can write to"
    return "Check the disk, or choose another directory"
