"""Tensors in shared memory: buckets that collectives reduce where they lie, without copies in or out."""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import numpy as np
import torch

from samestep.shm.region import Region, Segment

__all__ = ["NOT_SHARED", "Heap", "Place"]

_SLACK_BYTES = 2 * 1024 * 1024


class Place(NamedTuple):
    """Where a tensor lies in a rank's shared memory: what its peers need to find it."""

    segment: int  # its number among the segments of that rank; -1: not in shared memory
    fd: int
    segment_bytes: int
    offset: int


NOT_SHARED = Place(-1, -1, 0, 0)


class Heap:
    """The segments a rank has allocated tensors in, and those of its peers that it has attached.

    Memory: a segment whose tensors are all gone is used again for the next tensor that fits; it goes back to
    the system with the group.
    """

    def __init__(self, region: Region) -> None:
        self._region = region
        self._mine: list[Segment] = []
        self._free: list[int] = []
        self._theirs: dict[tuple[int, int], Segment] = {}
        self._closing = threading.Lock()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor in shared memory, its values undefined.

        Raises:
            OSError: there is not enough memory.
        """
        num_bytes = max(1, numel * dtype.itemsize)
        fitting = [
            n for n in self._free if num_bytes <= self._mine[n].num_bytes <= 2 * num_bytes + _SLACK_BYTES
        ]
        if fitting:
            number = min(fitting, key=lambda n: self._mine[n].num_bytes)
            self._free.remove(number)
        else:
            self._mine.append(Segment.create(-(-num_bytes // 4096) * 4096))
            number = len(self._mine) - 1
        # The tensor's storage holds this array, and nothing else does: it dies with the last view.
        block = np.frombuffer(self._mine[number].memory, dtype=np.uint8, count=num_bytes)
        weakref.finalize(block, self._free.append, number)
        return torch.frombuffer(block, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)

    def place(self, tensor: torch.Tensor) -> Place:
        """Where `tensor` lies, `NOT_SHARED` if it is not of this heap."""
        address = tensor.data_ptr()
        for number, segment in enumerate(self._mine):
            offset = address - segment.address
            if offset >= 0 and offset + tensor.nbytes <= segment.num_bytes:
                return Place(number, segment.fd, segment.num_bytes, offset)
        return NOT_SHARED

    def view(self, rank: int, place: Place, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The tensor of `numel` elements that `rank` has at `place`.

        Raises:
            OSError: it cannot be mapped: `rank` has died or closed it, or this process may open no more.
        """
        segment = self._theirs.get((rank, place.segment))
        if segment is None:
            segment = Segment.attach(self._region.pids[rank], place.fd, place.segment_bytes)
            self._theirs[rank, place.segment] = segment
        return segment.tensor(dtype, place.offset, numel)

    def close(self) -> None:
        """Peers can attach nothing more; mappings go with their last user. From any thread."""
        with self._closing:
            for segment in self._mine:
                segment.close()
            self._theirs.clear()
