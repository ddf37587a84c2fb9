"""Which checkpoints a directory holds."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from samestep.checkpoint.agreement import agreed, group_or_world
from samestep.checkpoint.layout import MANIFEST, MAX_MANIFEST_BYTES, CheckpointName, Manifest
from samestep.errors import CheckpointCorruptError, CheckpointError

__all__ = ["checkpoints_in", "is_checkpoint", "latest", "latest_in", "open_regular"]


def latest(
    directory: str | os.PathLike[str], *, process_group: dist.ProcessGroup | None = None
) -> Path | None:
    """The checkpoint of the highest step in `directory`; None if it holds none or does not exist.

    Directories that are not whole (files missing, cut short) and symbolic links are passed over.

    Ranks: all of the group. Rank 0 looks, so that all get the same answer.

    Args:
        directory: where `save` put checkpoints.
        process_group: the ranks that ask together. Default: the world.

    Raises:
        CheckpointError: `directory` cannot be read, on every rank.
    """
    group = group_or_world(process_group)

    def look() -> str | None:
        path = latest_in(Path(directory)) if group is None or group.rank() == 0 else None
        return None if path is None else str(path)

    path: str | None = agreed(look, group)[0]
    return None if path is None else Path(path)


def latest_in(directory: Path) -> Path | None:
    """As `latest`, for one process."""
    while True:
        listed = _list(directory)
        found = max(_whole(listed), default=None)
        if found is not None:
            return found[1]
        if _list(directory) == listed:
            return None
        # Another process has put a newer one there and removed all that were listed: look again.


def checkpoints_in(directory: Path) -> Iterator[tuple[CheckpointName, Path]]:
    """The whole checkpoints in `directory`, in no order. Sizes are looked at, contents are not."""
    return _whole(_list(directory))


def _list(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {directory}: {error.strerror}") from error


def _whole(entries: list[Path]) -> Iterator[tuple[CheckpointName, Path]]:
    for entry in entries:
        name = CheckpointName.parse(entry.name)
        if name is not None and not entry.is_symlink() and is_checkpoint(entry):
            yield name, entry


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a directory with a manifest and files of the sizes that it lists."""
    try:
        descriptor, num_bytes = open_regular(path / MANIFEST)
        with os.fdopen(descriptor, "rb") as file:
            if num_bytes > MAX_MANIFEST_BYTES:
                return False
            manifest = Manifest.from_json(file.read(), str(path / MANIFEST))
        for name, record in manifest.files.items():
            status = (path / name).lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size != record.num_bytes:
                return False
    except (OSError, CheckpointCorruptError):
        return False
    return True


def open_regular(path: Path) -> tuple[int, int]:
    """A descriptor for reading the regular file `path`, and its size; links, pipes and devices are refused.

    Raises:
        OSError: there is none, or it cannot be read.
        CheckpointCorruptError: it is something else.
    """
    if path.is_symlink():
        raise CheckpointCorruptError(f"{path} is a symbolic link: a checkpoint's files lie in its directory")
    # Non-blocking: opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CheckpointCorruptError(f"{path} is not a regular file")
    return descriptor, status.st_size
