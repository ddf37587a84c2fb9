"""The tree: the one order in which sums over ranks are made. Pure: it knows positions, not processes.

A sum over V positions adds neighbours pairwise, level by level; an odd one out is carried up as it is.
Seen from above: a node covers the positions `start..stop-1`, where `start` is a multiple of a power of two
and `stop - start` is that power, or less at the right edge:

    V = 6      0 1 2 3 4 5
    level 1    0+1 2+3 4+5
    level 2    (0+1)+(2+3) 4+5
    level 3    ((0+1)+(2+3))+(4+5)

Float addition is not associative: whoever sums whatever part of the positions, following the tree is what
makes the bits equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["PartialSums", "Span", "combine", "halves", "subtrees", "tree_sum"]

T = TypeVar("T")
Add = Callable[[T, T], T]


class Span(NamedTuple):
    """The positions `start`, ..., `stop - 1`."""

    start: int
    stop: int


def tree_sum(values: Sequence[T], add: Add[T]) -> T:
    """The sum of `values` along the tree.

    Args:
        values: one per position, at least one.
        add: called as `add(left, right)`; it may reuse the memory of `left`, never that of `right`.
    """
    level = list(values)
    if not level:
        raise ValueError("a sum over no positions has no value")
    while len(level) > 1:
        pairs = [add(left, right) for left, right in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]


def halves(node: Span) -> tuple[Span, Span] | None:
    """The two nodes whose sum is `node`; None for a single position.

    The left half is a full power of two; the right one may be cut short by the end of the positions.
    """
    length = node.stop - node.start
    if length == 1:
        return None
    middle = node.start + (1 << ((length - 1).bit_length() - 1))
    return Span(node.start, middle), Span(middle, node.stop)


def subtrees(block: Span, size: int) -> list[Span]:
    """The nodes of the tree over `size` positions that lie inside `block` and in no larger such node.

    They are what the process that holds `block` can sum by itself, in ascending order; no other cut of the
    block is shorter. A block of length n has at most 2 * log2(n) + 1 of them, exactly one if it is a node.
    """
    if not 0 <= block.start <= block.stop <= size:
        raise ValueError(f"the block {block.start}..{block.stop - 1} is not within 0..{size - 1}")
    nodes = []
    start = block.start
    while start < block.stop:
        node = Span(start, start + 1)
        while True:
            width = 2 * _width(node)
            parent = Span(start, min(start + width, size))
            if start % width or parent.stop > block.stop or parent == node:
                break
            node = parent
        nodes.append(node)
        start = node.stop
    return nodes


def combine(parts: Mapping[Span, T], size: int, add: Add[T]) -> T:
    """The sum over all `size` positions, from the sums of nodes that cover each position once.

    Args:
        parts: node -> its sum; those of all blocks' `subtrees` together are such a cover.
        size: number of positions.
        add: as for `tree_sum`.
    """

    def value(node: Span) -> T:
        if node in parts:
            return parts[node]
        children = halves(node)
        if children is None:
            raise ValueError(f"no part covers position {node.start}")
        left, right = children
        return add(value(left), value(right))

    return value(Span(0, size))


class PartialSums(Generic[T]):
    """The sums of the subtrees of a block, made from values that arrive one position after the other.

    Memory: at most log2(n) + 1 values for a block of n positions that is one node, and never more than twice
    that: a sum is folded into its neighbour as soon as the tree lets it be.
    """

    def __init__(self, block: Span, size: int, add: Add[T]) -> None:
        self.block = block
        self._add = add
        self._subtrees = subtrees(block, size)
        self._sums: list[tuple[Span, T]] = []
        self._position = block.start

    def push(self, value: T) -> None:
        """Take the value of the next position."""
        if self._position >= self.block.stop:
            raise ValueError(f"the block ends before position {self._position}")
        node = Span(self._position, self._position + 1)
        self._position += 1
        subtree = next(tree for tree in self._subtrees if tree.start <= node.start < tree.stop)
        while self._sums and self._sums[-1][0].start >= subtree.start:
            left, left_sum = self._sums[-1]
            parent = Span(left.start, node.stop)
            if halves(parent) != (left, node) or not _is_node(parent, subtree):
                break
            self._sums.pop()
            node, value = parent, self._add(left_sum, value)
        self._sums.append((node, value))

    def parts(self) -> dict[Span, T]:
        """Node -> its sum, once the whole block has been pushed."""
        if self._position != self.block.stop:
            raise ValueError(f"position {self._position} of the block has not been pushed")
        return dict(self._sums)


def _width(node: Span) -> int:
    """The power of two that `node` would span were it not cut short."""
    return 1 << (node.stop - node.start - 1).bit_length()


def _is_node(span: Span, tree: Span) -> bool:
    """Whether `span` is a node of `tree`."""
    node = tree
    while node != span:
        children = halves(node)
        if children is None:
            return False
        left, right = children
        node = left if span.start < left.stop else right
        if not node.start <= span.start < span.stop <= node.stop:
            return False
    return True
