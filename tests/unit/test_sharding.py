"""Cuts of buckets, and state in parts: pure."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import optim

from samestep.errors import OptimizerError
from samestep.optim.kinds import Kind, kind_of
from samestep.optim.layout import ALIGNMENT, BucketLayout, even_cuts, whole_cuts
from samestep.optim.position import is_position_independent
from samestep.optim.state import TensorSpec, WholeStates, cut_state, flat_view

numels = st.lists(st.integers(0, 1000), min_size=1, max_size=12)


def covered(
    layout: BucketLayout, num_ranks: int, longest: int | None = None
) -> dict[int, list[tuple[int, int]]]:
    """The pieces of each parameter, of all ranks."""
    found: dict[int, list[tuple[int, int]]] = {}
    for rank in range(num_ranks):
        for piece in layout.pieces(rank, longest):
            assert longest is None or piece.numel <= longest
            assert piece.offset == layout.offsets()[piece.parameter] + piece.start
            found.setdefault(piece.parameter, []).append((piece.start, piece.stop))
    return found


@given(numels, st.integers(1, 9), st.sampled_from([None, 64, 256]))
def test_even_cuts_cover_everything_once_and_evenly(
    sizes: list[int], num_ranks: int, longest: int | None
) -> None:
    cuts = even_cuts(sizes, num_ranks)
    layout = BucketLayout(tuple(range(len(sizes))), tuple(sizes), cuts)
    for parameter, numel in enumerate(sizes):
        ends = covered(layout, num_ranks, longest).get(parameter, [])
        assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])][: len(ends)]
        assert (ends[-1][1] if ends else 0) == numel
        assert all(start % ALIGNMENT == 0 for start, _ in ends)
    for rank in range(num_ranks):
        assert abs(cuts[rank + 1] - cuts[rank] - sum(sizes) / num_ranks) <= ALIGNMENT + 1


@given(st.lists(numels, min_size=1, max_size=4), st.integers(1, 9))
def test_whole_cuts_fall_between_parameters(buckets: list[list[int]], num_ranks: int) -> None:
    shares = [0] * num_ranks
    for sizes, cuts in zip(buckets, whole_cuts(buckets, num_ranks), strict=True):
        layout = BucketLayout(tuple(range(len(sizes))), tuple(sizes), cuts, whole=True)
        for parameter, ends in covered(layout, num_ranks).items():
            assert ends == [(0, sizes[parameter])]
        for rank in range(num_ranks):
            shares[rank] += cuts[rank + 1] - cuts[rank]
    total, largest = sum(map(sum, buckets)), max(max(sizes) for sizes in buckets)
    assert sum(shares) == total
    assert max(shares) <= total / num_ranks + largest


class Unknown(optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class SaysSo(Unknown):
    elementwise = True


class Untouched(optim.Adam):
    """Another name for torch's own step."""


@pytest.mark.parametrize(
    ("cls", "said", "kind"),
    [
        (optim.AdamW, None, Kind.ELEMENTS),
        (Untouched, None, Kind.ELEMENTS),
        (optim.Adafactor, None, Kind.WHOLE),
        (optim.SparseAdam, None, Kind.WHOLE),
        (optim.Muon, None, Kind.WHOLE),
        (Unknown, None, Kind.WHOLE),
        (Unknown, True, Kind.ELEMENTS),
        (SaysSo, None, Kind.ELEMENTS),
        (SaysSo, False, Kind.WHOLE),
        (lambda params, **options: optim.SGD(params, **options), None, Kind.WHOLE),
    ],
)
def test_kinds(cls, said, kind):
    assert kind_of(cls, said) is kind


def test_lbfgs_is_refused():
    with pytest.raises(OptimizerError, match="LBFGS"):
        kind_of(optim.LBFGS, True)


class Norm(optim.SGD):
    """Looks at whole tensors: where an element lies matters."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm())


def test_position_is_tried_out():
    cpu = torch.device("cpu")
    options = {"lr": 0.1, "weight_decay": 0.1}
    assert is_position_independent(optim.AdamW, options, torch.float32, cpu)
    assert not is_position_independent(optim.AdamW, options, torch.bfloat16, cpu)
    assert not is_position_independent(Norm, options, torch.float32, cpu)


@given(st.integers(0, 4 * 5 * 6 // 64), st.booleans(), st.booleans())
def test_a_state_is_cut_in_the_order_of_memory(place: int, saved_last: bool, ours_last: bool) -> None:
    def order(tensor: torch.Tensor, last: bool) -> torch.Tensor:
        return tensor.contiguous(memory_format=torch.channels_last) if last else tensor

    saved = order(torch.arange(120.0).view(1, 4, 5, 6), saved_last)
    like = order(torch.zeros(1, 4, 5, 6), ours_last)
    state = {"state": {7: {"m": saved, "step": torch.tensor(3.0)}}, "param_groups": [{"params": [7]}]}
    reader = WholeStates(state, [like.shape])
    start, stop = 64 * place, min(120, 64 * (place + 1))
    part = cut_state(reader, 0, like, start, stop, whole=False)
    assert torch.equal(part.tensors["m"], flat_view(like.copy_(saved))[start:stop])
    assert part.specs["m"] == TensorSpec.of(like)
    assert part.values == {"step": torch.tensor(3.0)}


def test_a_state_of_another_shape_is_refused():
    state = {"state": {0: {"m": torch.zeros(3, 4)}}, "param_groups": [{"params": [0]}]}
    like = torch.zeros(4, 3)
    with pytest.raises(OptimizerError, match=r"m of parameter 0 has the shape \[3, 4\]"):
        cut_state(WholeStates(state, [like.shape]), 0, like, 0, 12, whole=False)
