"""The tree: every V up to 64, every way to deal V positions to W <= V processes in contiguous blocks."""

from __future__ import annotations

import itertools
import math
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.tree import PartialSums, Span, combine, halves, subtrees, tree_sum

sizes = st.integers(1, 64)


def bracket(left: str, right: str) -> str:
    """Addition that records its own order."""
    return f"({left}+{right})"


def names(size: int) -> list[str]:
    return [str(position) for position in range(size)]


def even_blocks(size: int, num_processes: int) -> list[Span]:
    base, extra = divmod(size, num_processes)
    stops = [base * rank + min(rank, extra) for rank in range(num_processes + 1)]
    return [Span(start, stop) for start, stop in itertools.pairwise(stops)]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, list[Span]]:
    """A size and any contiguous blocks that cover it."""
    size = draw(sizes)
    inner = draw(st.sets(st.integers(1, size - 1))) if size > 1 else set()
    stops = [0, *sorted(inner), size]
    return size, [Span(start, stop) for start, stop in itertools.pairwise(stops)]


@pytest.mark.parametrize(
    ("size", "order"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
    ],
)
def test_neighbours_pairwise_the_odd_one_carried_up(size: int, order: str) -> None:
    assert tree_sum(names(size), bracket) == order


@given(sizes)
def test_halves_describe_the_same_tree(size: int) -> None:
    def walk(node: Span) -> str:
        children = halves(node)
        return str(node.start) if children is None else bracket(walk(children[0]), walk(children[1]))

    assert walk(Span(0, size)) == tree_sum(names(size), bracket)


@given(sizes)
def test_left_half_is_a_full_power_of_two(size: int) -> None:
    children = halves(Span(0, size))
    if children is not None:
        left = children[0].stop - children[0].start
        assert left & (left - 1) == 0
        assert left >= size - left


def sum_by_blocks(size: int, blocks: list[Span]) -> str:
    parts: dict[Span, str] = {}
    for block in blocks:
        sums = PartialSums(block, size, bracket)
        for position in range(block.start, block.stop):
            sums.push(str(position))
        assert list(sums.parts()) == subtrees(block, size)
        parts.update(sums.parts())
    return combine(parts, size, bracket)


@pytest.mark.parametrize("size", range(1, 65))
def test_who_plays_which_positions_does_not_change_the_sum(size: int) -> None:
    expected = tree_sum(names(size), bracket)
    for num_processes in range(1, size + 1):
        assert sum_by_blocks(size, even_blocks(size, num_processes)) == expected


@given(cuts())
def test_any_contiguous_blocks_give_the_same_sum(cut: tuple[int, list[Span]]) -> None:
    size, blocks = cut
    assert sum_by_blocks(size, blocks) == tree_sum(names(size), bracket)


@given(sizes, st.data())
def test_subtrees_are_the_shortest_cover(size: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size))
    block = Span(start, data.draw(st.integers(start, size)))
    nodes = subtrees(block, size)
    assert [p for node in nodes for p in range(*node)] == list(range(*block))
    length = block.stop - block.start
    if length:
        assert len(nodes) <= 2 * math.log2(length) + 1
    every_node = [Span(0, size)]
    for node in every_node:
        every_node += halves(node) or ()
    inside = [n for n in every_node if block.start <= n.start and n.stop <= block.stop]
    maximal = [
        n for n in inside if not any(o != n and o.start <= n.start and n.stop <= o.stop for o in inside)
    ]
    assert sorted(maximal) == nodes


@given(sizes, st.data())
def test_partial_sums_wait_only_along_the_tree(size: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size - 1))
    block = Span(start, data.draw(st.integers(start + 1, size)))
    sums = PartialSums(block, size, operator.add)
    nodes = subtrees(block, size)
    for position in range(block.start, block.stop):
        sums.push(position)
        waiting = [span for span, _ in sums._sums]
        current = next(node for node in nodes if node.start <= position < node.stop)
        in_progress = [span for span in waiting if span.start >= current.start]
        assert len(in_progress) <= math.log2(current.stop - current.start) + 1
        assert len(waiting) <= len(nodes) + math.log2(size) + 1
    assert sum(sums.parts().values()) == sum(range(*block))


def test_floats_differ_from_a_plain_sum_which_is_why_the_order_matters() -> None:
    values = [1e16, 1.0, 1.0, 1.0]
    assert tree_sum(values, operator.add) != sum(values)


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="no positions"):
        tree_sum([], operator.add)
    with pytest.raises(ValueError, match=r"0\.\.3"):
        subtrees(Span(2, 5), 4)
    with pytest.raises(ValueError, match="position 1"):
        combine({Span(0, 1): 1}, 2, operator.add)
    sums = PartialSums(Span(0, 1), 2, operator.add)
    with pytest.raises(ValueError, match="position 0"):
        sums.parts()
    sums.push(1)
    with pytest.raises(ValueError, match="ends before position 1"):
        sums.push(1)
