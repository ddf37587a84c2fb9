"""The pure parts of gradients/: rides, the tensors inside of outputs."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from samestep.gradients.outputs import map_tensors, tensors_in
from samestep.gradients.rides import MOST_ITEMS, num_rides, read_rides, write_rides


@given(
    st.lists(
        st.tuples(
            st.lists(st.booleans(), min_size=5, max_size=5), st.integers(0, MOST_ITEMS // 64), st.booleans()
        ),
        min_size=1,
        max_size=64,
    ),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_rides_add_up_exactly(ranks: list[tuple[list[bool], int, bool]], dtype: torch.dtype) -> None:
    total = torch.zeros(num_rides(5), dtype=dtype)
    for used, items, abandoned in ranks:
        mine = torch.empty(num_rides(5), dtype=dtype)
        write_rides(mine, used, items, abandoned)
        total += mine
    rides = read_rides(total)
    assert rides.used == tuple(sum(used[i] for used, _, _ in ranks) for i in range(5))
    assert rides.items == sum(items for _, items, _ in ranks)
    assert rides.abandoned == sum(abandoned for _, _, abandoned in ranks)


def test_rides_of_4096_ranks_are_exact_in_float32() -> None:
    mine = torch.empty(num_rides(1))
    write_rides(mine, [True], MOST_ITEMS, abandoned=True)
    rides = read_rides(mine * 4096)
    assert rides.used == (4096,)
    assert rides.items == 4096 * MOST_ITEMS


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Record:
    a: Any
    b: Any = None


class ModelOutput(collections.OrderedDict):
    """Like Hugging Face's: a mapping with attributes."""


class Plain:
    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.myself = self


def test_tensors_are_found_wherever_they_are() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    value = [None, Point(one, {"k": (two, "text", 3)}), Record(ModelOutput(last=three), Plain([one]))]
    assert [id(t) for t in tensors_in(value)] == [id(t) for t in (one, two, three, one)]
    assert list(tensors_in(3)) == []
    assert [id(t) for t in tensors_in(Plain([Plain(one), {"k": two}]))] == [id(two)]
    assert [id(t) for t in tensors_in(one)] == [id(one)]


@pytest.mark.parametrize(
    "build",
    [
        lambda t: [t, 1],
        lambda t: (t, None),
        lambda t: {"a": t},
        lambda t: Point(t, (t,)),
        lambda t: Record(t, {"deep": [t]}),
        lambda t: ModelOutput(last=t),
    ],
)
def test_mapping_keeps_types(build: Any) -> None:
    value = build(torch.ones(2))
    mapped = map_tensors(lambda t: t * 2, value)
    assert type(mapped) is type(value)
    assert all(torch.equal(t, torch.full((2,), 2.0)) for t in tensors_in(mapped))
    assert all(torch.equal(t, torch.ones(2)) for t in tensors_in(value))


def test_a_packed_sequence_moves_with_its_data() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    seen: list[Tensor] = []
    mapped = map_tensors(lambda t: seen.append(t) or t, packed)
    assert torch.equal(mapped.data, packed.data)
    assert len(seen) == 1
    assert [id(t) for t in tensors_in(packed)] == [id(packed.data)]
