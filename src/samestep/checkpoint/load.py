"""`load`: everything that was saved is verified first, and only then put into the objects."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from samestep.checkpoint import entries
from samestep.checkpoint import random_states as streams
from samestep.checkpoint.agreement import agreed, group_or_world
from samestep.checkpoint.reader import Reader, find_checkpoint
from samestep.checkpoint.same_bits import fixed_virtual_size, same_bits_notes
from samestep.errors import CheckpointError

__all__ = ["Loaded", "load"]


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
    found: str = agreed(lambda: str(find_checkpoint(Path(path))) if rank == 0 else None, group)[0]
    reader = Reader(Path(found))
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


def _names_to_read(reader: Reader, state: Mapping[str, object], *, strict: bool) -> list[str]:
    missing = [name for name in state if name not in reader.entries]
    if missing and strict:
        raise CheckpointError(
            f"{reader.path} has no {', '.join(map(repr, missing))}: it holds "
            f"{', '.join(map(repr, reader.entries)) or 'nothing'}. Ask for these, or load with strict=False"
        )
    return [name for name in state if name in reader.entries]


def _restore_random(reader: Reader, rank: int, world_size: int, *, is_fixed: bool) -> list[str]:
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
