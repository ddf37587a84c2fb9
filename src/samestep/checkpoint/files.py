"""The file operations by which a checkpoint is written, each one a method that a test can make fail."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import BinaryIO

__all__ = ["Files"]

_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP}


class Files:
    """The local file system; what is synced here survives a loss of power. Subclass it to inject failures."""

    def make_directory(self, path: Path) -> None:
        """A new directory at `path`; FileExistsError if there is anything."""
        path.mkdir()

    def create(self, path: Path) -> BinaryIO:
        """A new, unbuffered file at `path`, open for writing; FileExistsError if there is anything."""
        return path.open("xb", buffering=0)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        """All of `data` is in `file`."""
        while data:
            data = data[file.write(data) :]

    def sync(self, file: BinaryIO) -> None:
        """What was written to `file` is on the disk."""
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        """The names in the directory `path` are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:  # some file systems cannot, and need not
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """`source` is called `target`, at once; OSError if that is a file or a directory with content."""
        source.rename(target)

    def remove_tree(self, path: Path) -> None:
        """The directory `path` and all in it are gone; symbolic links are not followed."""
        shutil.rmtree(path)
