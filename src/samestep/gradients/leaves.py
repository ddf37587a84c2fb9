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
from samestep.tree import PartialSums
from samestep.virtual import VirtualRanks

__all__ = ["Leaves"]


@dataclass(eq=False)
class _Copy:
    """Memory laid out as a bucket's buffer is."""

    buffer: Tensor
    views: Sequence[Tensor]


class _BucketLeaves:
    """The partial sums of one bucket."""

    def __init__(self, bucket: Bucket, virtual: VirtualRanks) -> None:
        self.bucket = bucket
        self.num_copies = 0  # made so far: the most that have waited at a time
        self._virtual = virtual
        self._own = _Copy(bucket.buffer, [])
        self._free: list[_Copy] = []
        self.reset()

    def reset(self) -> None:
        """A step begins."""
        if hasattr(self, "_lent"):
            self._free += self._lent
        self._lent: list[_Copy] = []
        self._micro_batches: _Copy | None = None  # the sum over those of the virtual rank being played
        self._sums: PartialSums[_Copy] = PartialSums(
            self._virtual.block, self._virtual.virtual_size, self._add
        )

    def keep(self, scale: float, *, ends_virtual_rank: bool) -> None:
        """The parameters' gradients, times `scale`, wait in the tree; the parameters have none."""
        bucket = self.bucket
        leaf = self._take()
        bucket.move_to(leaf.buffer, leaf.views, scale)
        if self._micro_batches is not None:
            leaf = self._add(self._micro_batches, leaf)
        self._micro_batches = None if ends_virtual_rank else leaf
        if ends_virtual_rank:
            self._sums.push(leaf)

    def close(self) -> list[Tensor]:
        """The parts to be summed over the ranks; the bucket's buffer holds the last virtual rank's gradient."""
        if self._micro_batches is not None:
            self._add(self._micro_batches, self._own)
            self._micro_batches = None
        self._sums.push(self._own)
        return [copy.buffer for copy in self._sums.parts().values()]

    def void(self) -> list[Tensor]:
        """As many parts as others expect, of nothing."""
        num_parts = len(self._sums._subtrees)
        return [self.bucket.buffer] * num_parts

    @torch.no_grad()
    def _add(self, left: _Copy, right: _Copy) -> _Copy:
        numel = self.bucket.numel
        target, other = (right, left) if right is self._own else (left, right)
        torch.add(left.buffer[:numel], right.buffer[:numel], out=target.buffer[:numel])
        self._lent.remove(other)
        self._free.append(other)
        return target

    def _take(self) -> _Copy:
        if self._free:
            copy = self._free.pop()
        else:
            bucket = self.bucket
            buffer = torch.zeros_like(bucket.buffer)  # what lies behind the gradients stays zero
            views, offset = [], 0
            for slot in bucket.slots:
                views.append(view_like(slot.param, buffer, offset))
                offset += slot.param.numel()
            copy = _Copy(buffer, views)
            self.num_copies += 1
        self._lent.append(copy)
        return copy


class Leaves:
    """The partial sums of all buckets, and how they are summed over the ranks.

    Args:
        buckets: of the reducer.
        virtual: whose gradients.
        tree: sums over the ranks; None: the group's all-reduce, in whatever order.
    """

    def __init__(self, buckets: Sequence[Bucket], virtual: VirtualRanks, tree: TreeSum | None) -> None:
        self.tree = tree
        self.next_position = virtual.block.start  # whose gradient is to come
        self._virtual = virtual
        self._of = {bucket.index: _BucketLeaves(bucket, virtual) for bucket in buckets}

    def reset(self) -> None:
        """A step begins: what waits of another one is dropped."""
        self.next_position = self._virtual.block.start
        for leaves in self._of.values():
            leaves.reset()
        if self.tree is not None:
            self.tree.forget()

    def keep(self, scale: float, *, ends_virtual_rank: bool) -> None:
        """The gradients of a virtual rank, or of one of its micro-batches, are kept: see [Note: Partial sums]."""
        for leaves in self._of.values():
            leaves.keep(scale, ends_virtual_rank=ends_virtual_rank)
        self.next_position += ends_virtual_rank

    def close(self, bucket: Bucket, *, abandoned: bool) -> list[Tensor]:
        """The parts of `bucket`, whose buffer holds the last virtual rank's gradient, as `TreeSum` takes them."""
        leaves = self._of[bucket.index]
        return leaves.void() if abandoned else leaves.close()

    @property
    def num_copies(self) -> int:
        """How many copies of the gradients have waited at most, beside the buckets."""
        return max((leaves.num_copies for leaves in self._of.values()), default=0)
