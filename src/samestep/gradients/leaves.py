"""Leaves of the tree: the gradients of the virtual ranks that one process plays, and their partial sums.

[Note: Partial sums] In each step, virtual rank after virtual rank yields a gradient, already scaled. It is
added to its neighbour's as soon as the tree lets it be, so what waits is a copy of the gradients per level
of the tree: log2(V / W) for a block that is one subtree. The last virtual rank's gradient lies in the
buckets themselves, where the sum over the block's last subtree is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.gradients.bucket import Bucket, view_like
from samestep.reduction import TreeSum
from samestep.tree import PartialSums, subtrees
from samestep.virtual import VirtualRanks

__all__ = ["Leaves"]


@dataclass(eq=False)
class _Copy:
    """Memory laid out as a bucket's buffer is."""

    buffer: Tensor
    views: Sequence[Tensor]


class _Memory:
    """The copies of one bucket: those that wait are lent, the others free."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.own = _Copy(bucket.buffer, [])
        self.num_copies = 0  # made so far: the most that have waited at a time
        self._free: list[_Copy] = []
        self._lent: list[_Copy] = []

    def take(self) -> _Copy:
        """A copy whose contents are of the past; what lies behind the gradients is zero."""
        copy = self._free.pop() if self._free else self._make()
        self._lent.append(copy)
        return copy

    def take_back(self) -> None:
        """All copies are free."""
        self._free += self._lent
        self._lent.clear()

    @torch.no_grad()
    def add(self, left: _Copy, right: _Copy) -> _Copy:
        """The sum, in the bucket's own memory if that is one of them; the other one's is free."""
        numel = self.bucket.numel
        target, other = (right, left) if right is self.own else (left, right)
        torch.add(left.buffer[:numel], right.buffer[:numel], out=target.buffer[:numel])
        self._lent.remove(other)
        self._free.append(other)
        return target

    def _make(self) -> _Copy:
        self.num_copies += 1
        buffer = torch.zeros_like(self.bucket.buffer)
        views, offset = [], 0
        for slot in self.bucket.slots:
            views.append(view_like(slot.param, buffer, offset))
            offset += slot.param.numel()
        return _Copy(buffer, views)


class _BucketLeaves:
    """The partial sums of one bucket."""

    def __init__(self, bucket: Bucket, virtual: VirtualRanks) -> None:
        self.memory = _Memory(bucket)
        self._virtual = virtual
        self._num_parts = len(subtrees(virtual.block, virtual.virtual_size))
        self._micro_batches: _Copy | None = None  # the sum over those of the virtual rank being played
        self._sums = self._new_sums()

    def reset(self) -> None:
        """A step begins."""
        if self._virtual.is_single and self._micro_batches is None:
            return
        self.memory.take_back()
        self._micro_batches = None
        self._sums = self._new_sums()

    def keep(self, scale: float, *, ends_virtual_rank: bool) -> None:
        """The parameters' gradients, times `scale`, wait in the tree; the parameters have none."""
        leaf = self.memory.take()
        self.memory.bucket.move_to(leaf.buffer, leaf.views, scale)
        if self._micro_batches is not None:
            leaf = self.memory.add(self._micro_batches, leaf)
        self._micro_batches = None if ends_virtual_rank else leaf
        if ends_virtual_rank:
            self._sums.push(leaf)

    def close(self) -> list[Tensor]:
        """The parts to be summed over the ranks; the buffer holds the last virtual rank's gradient."""
        own = self.memory.own
        if self._micro_batches is not None:
            self.memory.add(self._micro_batches, own)
            self._micro_batches = None
        if self._virtual.is_single:
            return [own.buffer]
        self._sums.push(own)
        return [copy.buffer for copy in self._sums.parts().values()]

    def void(self) -> list[Tensor]:
        """As many parts as others expect, of nothing."""
        return [self.memory.own.buffer] * self._num_parts

    def _new_sums(self) -> PartialSums[_Copy]:
        # It holds the memory and not this object: [Note: Who holds whom] in reducer.py.
        return PartialSums(self._virtual.block, self._virtual.virtual_size, self.memory.add)


class Leaves:
    """The partial sums of all buckets, and how they are summed over the ranks.

    Args:
        buckets: of the reducer.
        virtual: whose gradients.
        tree: sums over the ranks; None: the group's all-reduce, in whatever order.
    """

    def __init__(self, buckets: Sequence[Bucket], virtual: VirtualRanks, tree: TreeSum | None) -> None:
        self.tree = tree
        self._of = {bucket.index: _BucketLeaves(bucket, virtual) for bucket in buckets}

    def reset(self) -> None:
        """A step begins: what waits of another one is dropped."""
        for leaves in self._of.values():
            leaves.reset()
        if self.tree is not None:
            self.tree.forget()

    def keep(self, scale: float, *, ends_virtual_rank: bool) -> None:
        """The gradients of a virtual rank, or of one of its micro-batches, wait: [Note: Partial sums]."""
        for leaves in self._of.values():
            leaves.keep(scale, ends_virtual_rank=ends_virtual_rank)

    def close(self, bucket: Bucket, *, abandoned: bool) -> list[Tensor]:
        """The parts of `bucket` for `TreeSum`; its buffer holds the last virtual rank's gradient."""
        leaves = self._of[bucket.index]
        return leaves.void() if abandoned else leaves.close()

    def may_scatter(self, bucket: Bucket) -> bool:
        """Whether `reduce_slices`, which adds along the tree over ranks on CPUs, gives the same sums."""
        return self.tree is None or (self.tree.follows_ranks and bucket.buffer.device.type == "cpu")

    @property
    def num_copies(self) -> int:
        """How many copies of the gradients have waited at most, beside the buckets."""
        return max((leaves.memory.num_copies for leaves in self._of.values()), default=0)
