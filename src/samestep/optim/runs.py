"""Runs: neighbouring pieces that the inner optimizer updates as one flat tensor, and their state.

[Note: One tensor for many parameters]
An element-wise optimizer does not care where one parameter ends and the next begins, and a call for one long
tensor costs less than a thousand for short ones. Pieces form one run if they lie side by side, belong to one
parameter group and have been through the same: equal step counts, equal keys. When a backward leaves out
some of a run's parameters, the run is split for good.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samestep.optim.flat import FlatBucket
from samestep.optim.layout import Piece
from samestep.optim.state import PartState, TensorSpec, flat_view

__all__ = ["Run", "group_pieces", "joined_state", "part_states"]

_MOST_COMPARED = 16  # elements of a value


@dataclass(eq=False)
class Run:
    """One parameter of the inner optimizer."""

    bucket: FlatBucket
    group: int  # the number of its parameter group
    pieces: list[Piece]
    param: nn.Parameter = field(init=False)  # shares the memory of the pieces
    gradient: Tensor | None = field(init=False)  # where theirs lies, flat; None for a whole parameter

    def __post_init__(self) -> None:
        bucket = self.bucket
        if bucket.layout.whole:
            (piece,) = self.pieces
            self.param = nn.Parameter(bucket.view_of(piece.parameter))
            self.gradient = None
            return
        start, stop = self.pieces[0].offset, self.pieces[-1].offset + self.pieces[-1].numel
        self.param = nn.Parameter(bucket.values(start, stop))
        self.gradient = bucket.gradient_place(start, stop)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.param.numel()

    def take_gradients(self) -> list[bool]:
        """The gradient of each piece is where the run's is; whether each has one."""
        bucket = self.bucket
        if self.gradient is None:
            grad = bucket.whole_gradient(self.pieces[0].parameter)
            self.param.grad = grad
            return [grad is not None]
        found = [bucket.bring_gradient(piece) for piece in self.pieces]
        self.param.grad = self.gradient if found[0] else None
        return found


def group_pieces(
    bucket: FlatBucket,
    pieces: Sequence[Piece],
    groups: Sequence[int],
    states: Sequence[PartState],
    *,
    merge: bool,
    longest: int | None = None,
) -> list[tuple[Run, list[PartState]]]:
    """The longest runs that `pieces` of one bucket, in order, can form, each with its pieces' states.

    `longest`: of no more elements, unless one piece has more.
    """
    result: list[tuple[Run, list[PartState]]] = []
    members: list[Piece] = []
    held: list[PartState] = []
    last: Hashable = None
    group_of_last = 0
    for piece, group, state in zip(pieces, groups, states, strict=True):
        kind: Hashable = (group, _signature(state))
        fits = longest is None or not members or piece.offset + piece.numel - members[0].offset <= longest
        if members and (not merge or kind != last or bucket.layout.whole or not fits):
            result.append((Run(bucket, group_of_last, members), held))
            members, held = [], []
        members.append(piece)
        held.append(state)
        last, group_of_last = kind, group
    if members:
        result.append((Run(bucket, group_of_last, members), held))
    return result


def _signature(state: PartState) -> Hashable:
    """Equal for states that can be one: the same keys, dtypes and values."""
    tensors = tuple(sorted((key, str(tensor.dtype)) for key, tensor in state.tensors.items()))
    return tensors, tuple((key, _comparable(state.values[key])) for key in sorted(state.values))


def _comparable(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        if value.numel() > _MOST_COMPARED:
            return object()  # equal to nothing else
        return str(value.dtype), tuple(value.shape), repr(value.tolist())
    return type(value), repr(value)


def joined_state(run: Run, states: Sequence[PartState]) -> dict[str, Any]:
    """The inner optimizer's state of `run`, from the states of its pieces, which fit each other."""
    first = states[0]
    shape = run.param.shape
    state: dict[str, Any] = {}
    for key, tensor in first.tensors.items():
        if run.bucket.layout.whole:
            spec = first.specs[key]
            whole = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device=run.param.device)
            flat_view(whole).copy_(tensor)
            state[key] = whole
        else:
            state[key] = torch.cat([part.tensors[key] for part in states]).to(run.param.device).view(shape)
    for key, value in first.values.items():
        # A copy: each run counts its own steps.
        state[key] = value.clone() if isinstance(value, Tensor) else value
    return state


def part_states(run: Run, state: dict[str, Any]) -> list[PartState]:
    """What the inner optimizer's `state` of `run` means for each of its pieces; tensors are views of it."""
    if run.bucket.layout.whole:
        cut = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim() > 0}
        specs = {key: TensorSpec.of(tensor) for key, tensor in cut.items()}
        values = {k: v for k, v in state.items() if k not in cut}
        return [PartState({k: flat_view(v) for k, v in cut.items()}, specs, values)]
    cut = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == run.param.shape}
    values = {k: v for k, v in state.items() if k not in cut}
    base = run.pieces[0].offset
    result = []
    for piece in run.pieces:
        like = TensorSpec.of(run.bucket.view_of(piece.parameter))
        first = piece.offset - base
        tensors = {key: tensor[first : first + piece.numel] for key, tensor in cut.items()}
        specs = {key: TensorSpec(like.shape, like.stride, tensor.dtype) for key, tensor in cut.items()}
        result.append(PartState(tensors, specs, dict(values)))
    return result
