"""Optimizer state in parts: what of a parameter's state a slice holds, and how it is written and read. Pure.

[Note: Parts]
The state of a parameter is a dict. Tensors of the parameter's shape are cut as the parameter is, and counted,
as it is, in the order of memory; of the others ("step") each part has a copy. An optimizer that looks at
whole parameters has whole ones: there every tensor with a dimension counts as cut, in one part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from samestep.errors import OptimizerError

__all__ = [
    "PartState",
    "ShardedState",
    "StateReader",
    "StateSlice",
    "TensorSpec",
    "WholeStates",
    "cut_state",
    "flat_view",
]


@dataclass(frozen=True)
class TensorSpec:
    """What a whole state tensor is like. It is dense; its elements are counted in the order of memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """That of `tensor`, or of a dense copy if it has gaps."""
        dense = torch.empty_like(tensor, device="meta")
        return cls(tuple(tensor.shape), dense.stride(), tensor.dtype)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def empty(self, device: torch.device) -> Tensor:
        """A tensor like it, unset."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class PartState:
    """The state of one piece of a parameter."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # flat: the elements of the piece
    specs: dict[str, TensorSpec] = field(default_factory=dict)  # of the whole tensors, by the same keys
    values: dict[str, Any] = field(default_factory=dict)  # what is not cut

    def __bool__(self) -> bool:
        return bool(self.tensors or self.values)


@dataclass(frozen=True)
class StateSlice:
    """This rank's part of one state tensor.

    The whole one is `torch.empty_strided(shape, stride, dtype=tensor.dtype)`; its elements from number
    `offset` on, in the order of its memory, are those of `tensor`.
    """

    parameter: int  # the parameter's number, as in a state_dict()
    name: str  # its name where one is known, else "parameter 3"
    key: str  # "exp_avg"
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    tensor: Tensor  # flat; a live view of the state


@dataclass(frozen=True)
class ShardedState:
    """One rank's part of an optimizer's state.

    The slices of all ranks cover each state tensor once. `values` holds, per parameter of which this rank has
    a part, what is not cut; ranks that share a parameter hold equal ones.
    """

    param_groups: list[dict[str, Any]]  # as in a state_dict(): parameters are numbers; equal on all ranks
    slices: list[StateSlice]
    values: dict[int, dict[str, Any]]


class StateReader(Protocol):
    """Where a saved state comes from, whoever saved it at whatever number of ranks."""

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """As in a state_dict()."""

    def tensors(self, parameter: int) -> Mapping[str, TensorSpec]:
        """The cut tensors of a parameter's state by key; none if it has no state."""

    def values(self, parameter: int) -> Mapping[str, Any]:
        """The rest of its state."""

    def read(self, parameter: int, key: str, start: int, stop: int) -> Tensor:
        """Elements `start`, ..., `stop - 1`, flat, of a cut tensor."""


class WholeStates:
    """A reader of torch's own format: the state of all parameters, whole."""

    def __init__(self, state_dict: Mapping[str, Any], shapes: Sequence[torch.Size]) -> None:
        self.param_groups: Sequence[Mapping[str, Any]] = state_dict["param_groups"]
        saved = [number for group in self.param_groups for number in group["params"]]
        self._state = {i: state_dict["state"].get(number, {}) for i, number in enumerate(saved)}
        self._shapes = shapes

    def tensors(self, parameter: int) -> dict[str, TensorSpec]:
        """See `StateReader`."""
        state = self._state[parameter].items()
        return {key: TensorSpec.of(value) for key, value in state if self._is_cut(parameter, key, value)}

    def values(self, parameter: int) -> dict[str, Any]:
        """See `StateReader`."""
        state = self._state[parameter].items()
        return {key: value for key, value in state if not self._is_cut(parameter, key, value)}

    def read(self, parameter: int, key: str, start: int, stop: int) -> Tensor:
        """See `StateReader`."""
        return flat_view(self._state[parameter][key])[start:stop]

    def _is_cut(self, parameter: int, key: str, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return False
        # Of a parameter without dimensions, only the name tells its step count from its moments.
        return value.dim() > 0 or (value.shape == self._shapes[parameter] and key != "step")


def cut_state(
    reader: StateReader, parameter: int, like: Tensor, start: int, stop: int, *, whole: bool
) -> PartState:
    """What the piece `start`, ..., `stop - 1` of `parameter`, which is like `like`, needs of a saved state.

    Raises:
        OptimizerError: the state is of a parameter of another shape.
    """
    part = PartState(values=dict(reader.values(parameter)))
    for key, spec in reader.tensors(parameter).items():
        if whole:
            part.tensors[key] = reader.read(parameter, key, 0, spec.numel)
            part.specs[key] = spec
        elif spec.shape == tuple(like.shape):
            part.tensors[key] = _read_like(reader, parameter, key, spec, like, start, stop)
            part.specs[key] = TensorSpec(spec.shape, TensorSpec.of(like).stride, spec.dtype)
        elif spec.numel == 1:  # one number for all of the parameter, in a tensor with a dimension
            part.values[key] = reader.read(parameter, key, 0, 1).reshape(spec.shape)
        else:
            raise OptimizerError(
                f"the saved {key} of parameter {parameter} has the shape {list(spec.shape)}, the parameter "
                f"{list(like.shape)}: build the optimizer over the parameters that were saved, in their order"
            )
    return part


def _read_like(
    reader: StateReader, parameter: int, key: str, spec: TensorSpec, like: Tensor, start: int, stop: int
) -> Tensor:
    """The piece of a saved tensor, counted in the memory order of `like`."""
    if _same_order(spec.shape, spec.stride, TensorSpec.of(like).stride):
        return reader.read(parameter, key, start, stop)
    saved = spec.empty(torch.device("cpu"))
    flat_view(saved).copy_(reader.read(parameter, key, 0, spec.numel))
    ours = torch.empty_like(like, dtype=spec.dtype, device="cpu").copy_(saved)
    return flat_view(ours)[start:stop]


def _same_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    return all(size == 1 or a == b for size, a, b in zip(shape, one, other, strict=True))


def flat_view(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of memory, as a view; of one with gaps, as a copy."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    dense = torch.empty_like(tensor, device="meta")
    if not _same_order(tensor.shape, dense.stride(), tensor.stride()):
        tensor = torch.empty_like(tensor).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
