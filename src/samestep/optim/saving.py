"""What a sharded optimizer saves and loads: whole states in torch's form, or each rank's slices."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor

from samestep.errors import GradientError, OptimizerError
from samestep.gradients.meeting import meet
from samestep.optim.exchange import gather_states
from samestep.optim.groups import NOT_OPTIONS, check_sizes, number_parameters
from samestep.optim.shards import Shards
from samestep.optim.state import (
    PartState,
    ShardedState,
    StateReader,
    StateSlice,
    WholeStates,
    cut_state,
)

if TYPE_CHECKING:
    from samestep.optim.sharded import ShardedOptimizer

__all__ = ["Saving"]

_PATIENCE = timedelta(minutes=2)


class Saving:
    """A mix-in of `ShardedOptimizer`."""

    _consolidated: tuple[int, dict[int, dict[str, Any]]] | None

    def state_dict(self: ShardedOptimizer) -> dict[str, Any]:  # type: ignore[misc]
        """The state of all parameters, whole, as the plain optimizer's `state_dict()` has it.

        Ranks: all; or, after `consolidate_state_dict(to)`, rank `to` alone.

        Raises:
            OptimizerError: not all ranks have called it, or it was consolidated on another one.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        if self._consolidated is None:
            states = self._whole_states(meeting="state_dict()")
        elif self._consolidated[0] == self.process_group.rank():
            states = self._consolidated[1]
        else:
            raise OptimizerError(
                f"the state was consolidated on rank {self._consolidated[0]}: call state_dict() there, or on "
                "all ranks without consolidate_state_dict()"
            )
        found: dict[str, Any] = {"state": states, "param_groups": number_parameters(self.param_groups)}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, found)
            found = found if changed is None else changed
        return found

    def consolidate_state_dict(self: ShardedOptimizer, to: int = 0) -> None:  # type: ignore[misc]
        """Rank `to` can call `state_dict()` by itself, until the next step.

        Ranks: all.
        """
        self._consolidated = (to, self._whole_states(meeting="consolidate_state_dict()", to=to))

    def load_state_dict(self: ShardedOptimizer, state_dict: Mapping[str, Any]) -> None:  # type: ignore[misc]
        """Go on from a `state_dict()`, of this class at whatever number of ranks or of the plain optimizer.

        Each rank takes its slices of it.

        Ranks: all, with the same one.

        Raises:
            OptimizerError: it is of other groups or shapes.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else dict(changed)
        shapes = [p.shape for group in self.param_groups for p in group["params"]]
        check_sizes(state_dict["param_groups"], self.param_groups)
        self.load_sharded_state(WholeStates(state_dict, shapes))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def sharded_state(self: ShardedOptimizer) -> ShardedState:  # type: ignore[misc]
        """This rank's part of the state; its tensors are live.

        Ranks: any, alone; all ranks' parts together are the whole state.
        """
        state = ShardedState(number_parameters(self.param_groups), [], {})
        for _, piece, part in self._existing().pieces():
            if not part:
                continue
            state.values[piece.parameter] = part.values
            for key, tensor in part.tensors.items():
                spec = part.specs[key]
                name = self._name_of(piece.parameter)
                state.slices.append(
                    StateSlice(piece.parameter, name, key, spec.shape, spec.stride, piece.start, tensor)
                )
        return state

    def load_sharded_state(self: ShardedOptimizer, reader: StateReader) -> None:  # type: ignore[misc]
        """Go on from a saved state; each rank reads what it needs.

        Ranks: all, each by itself, from the same saved state.

        Raises:
            OptimizerError: it is of other groups or shapes.
        """
        check_sizes(reader.param_groups, self.param_groups)
        shards = self._existing()
        for group, saved in zip(self.param_groups, reader.param_groups, strict=True):
            kept = {key: group[key] for key in NOT_OPTIONS if key in group}
            group.clear()
            group.update({**{k: deepcopy(v) for k, v in saved.items() if k != "params"}, **kept})
        self._fill(shards, reader)
        self._consolidated = None

    # Inside

    def _whole_states(  # type: ignore[misc]
        self: ShardedOptimizer, *, meeting: str = "", to: int | None = None
    ) -> dict[int, dict[str, Any]]:
        """The state of all parameters. Ranks: all; one that is alone at a `meeting` is told so."""
        group = self.process_group
        if meeting and group.size() > 1:
            self._num_meetings += 1
            key = f"sharded/{self._serial}/{self._num_meetings}"
            try:
                meet(group, key, f"called {meeting} of a sharded optimizer", patience=_PATIENCE)
            except GradientError as error:
                raise OptimizerError(
                    f"{error}. For one rank's use, first consolidate_state_dict(to=...)"
                ) from None
        return gather_states(self._existing().pieces(), group, keep=to in (None, group.rank()))

    def _fill(self: ShardedOptimizer, shards: Shards, reader: StateReader) -> None:  # type: ignore[misc]
        states: dict[tuple[int, int], PartState] = {}
        for bucket, piece, _ in shards.pieces():
            like = bucket.view_of(piece.parameter)
            part = cut_state(
                reader, piece.parameter, like, piece.start, piece.stop, whole=bucket.layout.whole
            )
            states[piece.parameter, piece.start] = _cast(part, like)
        shards.fill(self.param_groups, states)

    def _name_of(self: ShardedOptimizer, number: int) -> str:  # type: ignore[misc]
        parameter = self._parameters()[number]
        names = [n for group in self.param_groups for n in group.get("param_names", ())]
        if names:
            return str(names[number])
        return self._names.get(id(parameter), f"parameter {number}")


def _cast(part: PartState, like: Tensor) -> PartState:
    """The state in the dtypes that torch would load it in; numbers beside it stay exact."""
    tensors = {
        key: tensor.to(
            like.device, like.dtype if tensor.is_floating_point() and like.is_floating_point() else None
        )
        for key, tensor in part.tensors.items()
    }
    return PartState(tensors, part.specs, part.values)
