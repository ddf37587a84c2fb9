"""ShardedOptimizer: each rank keeps and updates its slice of everything (ZeRO, Rajbhandari et al. 2020)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from samestep.errors import OptimizerError
from samestep.gradients.meeting import meet, serial_number
from samestep.gradients.reducer import Reducer, reducer_of
from samestep.optim.exchange import gather_states, verify_alike
from samestep.optim.flat import FlatBucket
from samestep.optim.kinds import Kind, is_torchs_own, kind_of
from samestep.optim.plan import plan_layouts
from samestep.optim.position import is_position_independent
from samestep.optim.shards import Shards
from samestep.optim.sliced_norm import clip_gradients
from samestep.optim.state import (
    PartState,
    ShardedState,
    StateReader,
    StateSlice,
    WholeStates,
    cut_state,
    number_parameters,
)
from samestep.world import default_group

__all__ = ["ShardedOptimizer"]

_PATIENCE = timedelta(minutes=2)
_NOT_OPTIONS = ("params", "param_names")


class ShardedOptimizer(torch.optim.Optimizer, Joinable):
    """An optimizer whose state and work are dealt out: each rank has 1/W of both, all have the same result.

    Takes the place of `torch.distributed.optim.ZeroRedundancyOptimizer`, and of any optimizer class of which
    it is given the name and the arguments:

        model = samestep.DistributedDataParallel(net)
        optimizer = samestep.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)

    Each bucket of the wrapper is cut in one contiguous slice per rank. In `step()` a rank updates its slices
    with an inner optimizer of the given class, and gathers the others'. The weights are the bits that the
    plain optimizer would have made of the same gradients; schedulers, GradScaler, closures and hooks see an
    optimizer like any other.

    Optimizers that look at more than single elements (Adafactor, Muon, SparseAdam, and all that torch does
    not ship) are dealt out by whole parameters; LBFGS is refused.

    Ranks: all construct it alike. `step`, `state_dict`, `consolidate_state_dict` and `clip_grad_norm_` are
    collectives.

    Memory: parameters are moved, they become views of flat buffers laid out like the buckets.

    Args:
        params: the model (wrapped or not), or what an optimizer takes: parameters, or groups of them. The
            wrapper is found through the parameters; they may also have none, if their gradients are the same
            on all ranks by other means.
        optimizer_class: of the optimizer; also anything that is called like one.
        process_group: the ranks that share the work; default: the wrapper's, else the world.
        parameters_as_bucket_view: ignored (torch has it): they always are.
        overlap_with_ddp: ignored (torch has it): gradients always travel while backward goes on.
        stage: 1: gradients are averaged whole, `param.grad` is what it always is. 2: each rank gets only its
            slice of the average, which saves half of the traffic; `param.grad` then says so when it is read,
            and `clip_grad_norm_` is this class's own. Needs samestep's wrapper over the same ranks.
        elementwise: True says that the update of an element depends on that element alone, for a class that
            torch does not ship. Default: known of torch's; else what the class's attribute `elementwise`
            says; else False.
        **defaults: the arguments of `optimizer_class`.

    Raises:
        OptimizerError: the class cannot be sharded, `stage` does not fit, or ranks differ.

    Source: ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, arXiv:1910.02054.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        stage: int = 1,
        elementwise: bool | None = None,
        **defaults: Any,
    ) -> None:
        if stage not in (1, 2):
            raise OptimizerError(f"stage={stage!r}: it must be 1 (whole gradients) or 2 (sliced gradients)")
        self._kind = kind_of(optimizer_class, elementwise)
        self._names: dict[int, str] = {}
        if isinstance(params, nn.Module):
            named = [(n.removeprefix("module."), p) for n, p in params.named_parameters()]
            self._names = {id(p): name for name, p in named}
            params = [p for _, p in named]
        self.stage = stage
        self._class = optimizer_class
        self._class_options = defaults
        self._shards: Shards | None = None
        self._reducers: list[Reducer] = []
        self._num_synchronised = 0
        self._has_state = False
        self._num_meetings = 0
        self._consolidated: tuple[int, dict[int, dict[str, Any]]] | None = None
        self._merges: dict[tuple[torch.dtype, torch.device], bool] = {}
        # The class itself checks its arguments and completes the groups, over the parameters as they are.
        template = self._make(_as_groups(params))
        Joinable.__init__(self)
        torch.optim.Optimizer.__init__(
            self, [_with_names(g) for g in template.param_groups], template.defaults
        )
        self._find_reducers()
        first = self._reducers[0].group if self._reducers else None
        self.process_group = process_group or first or default_group()
        self._serial = serial_number(self.process_group)
        self._lay_out({})

    # Training

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters; what `closure` returned.

        Ranks: all, after the same synchronised backwards.
        """
        if self._join_config.enable:
            Join.notify_join_context(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shards = self._settled()
        self._consolidated = None
        self._copy_options(self.param_groups, shards.inner.param_groups)
        scaling = [name for name in ("grad_scale", "found_inf") if hasattr(self, name)]
        for name in scaling:  # from GradScaler, for fused optimizers
            setattr(shards.inner, name, getattr(self, name))
        try:
            shards.update(_unhooked_step(shards.inner))
        finally:
            for name in scaling:
                delattr(shards.inner, name)
        self._copy_options(shards.inner.param_groups, self.param_groups)
        self._has_state = True
        self._num_synchronised = sum(reducer.num_backwards for reducer in self._reducers)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What GradScaler asks: whether the inner optimizer unscales gradients by itself."""
        return self._shards is not None and getattr(self._shards.inner, "_step_supports_amp_scaling", False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Another group of parameters is updated from now on.

        Ranks: all, between the same two steps.
        """
        if self._shards is None:
            super().add_param_group(param_group)
            return
        completed = self._make([dict(param_group)]).param_groups[0]
        before = self._whole_states()
        super().add_param_group(_with_names(completed))
        self._find_reducers()
        self._lay_out(before)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """The norm of all gradients as one vector; they are scaled down so that it is `max_norm` at most.

        At stage 1 the same bits as `torch.nn.utils.clip_grad_norm_`; at stage 2 summed over slices, in
        float64.

        Ranks: all.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite`.
        """
        return clip_gradients(
            self._parameters(), max_norm, norm_type, self.process_group, error_if_nonfinite=error_if_nonfinite
        )

    def gather_gradients(self) -> None:
        """`param.grad` is the whole average, after stage 2 had left each rank its slice.

        Ranks: all, after a synchronised backward.
        """
        for reducer in self._reducers:
            reducer.gather()

    # State

    def state_dict(self) -> dict[str, Any]:
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

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Rank `to` can call `state_dict()` by itself, until the next step.

        Ranks: all.
        """
        self._consolidated = (to, self._whole_states(meeting="consolidate_state_dict()", to=to))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
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
        self._check_groups(state_dict["param_groups"])
        self.load_sharded_state(WholeStates(state_dict, shapes))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def sharded_state(self) -> ShardedState:
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

    def load_sharded_state(self, reader: StateReader) -> None:
        """Go on from a saved state; each rank reads what it needs.

        Ranks: all, each by itself, from the same saved state.

        Raises:
            OptimizerError: it is of other groups or shapes.
        """
        self._check_groups(reader.param_groups)
        shards = self._existing()
        for group, saved in zip(self.param_groups, reader.param_groups, strict=True):
            kept = {key: group[key] for key in _NOT_OPTIONS if key in group}
            group.clear()
            group.update({**{k: deepcopy(v) for k, v in saved.items() if k != "params"}, **kept})
        self._fill(shards, reader)
        self._consolidated = None
        self._has_state = True

    @property
    def state_bytes(self) -> int:
        """The size of the optimizer state that this rank keeps."""
        return self._existing().state_bytes

    # Inside

    def _make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return self._class(groups, **self._class_options)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _name_of(self, number: int) -> str:
        parameter = self._parameters()[number]
        names = [n for group in self.param_groups for n in group.get("param_names", ())]
        if names:
            return str(names[number])
        return self._names.get(id(parameter), f"parameter {number}")

    def _existing(self) -> Shards:
        assert self._shards is not None
        return self._shards

    def _find_reducers(self) -> None:
        found: dict[int, Reducer] = {}
        for parameter in self._parameters():
            reducer = reducer_of(parameter)
            if reducer is not None:
                found[id(reducer)] = reducer
        self._reducers = list(found.values())
        for reducer in self._reducers:
            self._names.update({id(slot.param): slot.name for slot in reducer.slots})

    def _lay_out(self, states: dict[int, dict[str, Any]]) -> None:
        """Everything that follows from the parameters and their reducers is made anew.

        Ranks: all. `states`: the whole ones, by number of parameter.
        """
        parameters, group = self._parameters(), self.process_group
        self._check_stage()
        verify_alike(
            {
                "the optimizer class": getattr(self._class, "__name__", "?"),
                "the stage": self.stage,
                "the number of parameters per group": [len(g["params"]) for g in self.param_groups],
                "a parameter's shape": [list(p.shape) for p in parameters],
            },
            group,
        )
        planned = plan_layouts(parameters, self._reducers, self._kind, group.size())
        self._shards = Shards(
            planned,
            parameters,
            self.param_groups,
            group,
            self._make,
            merge=self._may_merge,
            one_by_one=is_torchs_own(self._class),
        )
        if states:
            groups = number_parameters(self.param_groups)
            whole = WholeStates({"state": states, "param_groups": groups}, [p.shape for p in parameters])
            self._fill(self._shards, whole)
        for reducer in self._reducers:
            reducer.sharded_by = weakref.ref(self)
            if self.stage == 2:
                reducer.scatter(
                    {
                        plan.source.index: plan.layout.cuts
                        for plan in planned
                        if plan.source in reducer.queue.buckets
                        and len(plan.source.slots) == len(plan.layout.parameters)
                    }
                )

    def _fill(self, shards: Shards, reader: StateReader) -> None:
        states: dict[tuple[int, int], PartState] = {}
        for bucket, piece, _ in shards.pieces():
            like = bucket.view_of(piece.parameter)
            part = cut_state(
                reader, piece.parameter, like, piece.start, piece.stop, whole=bucket.layout.whole
            )
            states[piece.parameter, piece.start] = _cast(part, like)
        shards.fill(self.param_groups, states)

    def _settled(self) -> Shards:
        """The shards, laid out anew if the wrapper has planned its buckets anew. Ranks: all."""
        shards = self._existing()
        loose = [p for b in shards.buckets if b.source is None for p in b.parameters if p.requires_grad]
        if not any(r.closed for r in self._reducers) and all(reducer_of(p) is None for p in loose):
            return shards
        before = self._whole_states()
        self._find_reducers()
        self._lay_out(before)
        return self._existing()

    def _whole_states(self, *, meeting: str = "", to: int | None = None) -> dict[int, dict[str, Any]]:
        """The state of all parameters. Ranks: all; one that is alone at a `meeting` is told so."""
        group = self.process_group
        if meeting and group.size() > 1:
            self._num_meetings += 1
            key = f"sharded/{self._serial}/{self._num_meetings}"
            meet(group, key, f"called {meeting} of a sharded optimizer", patience=_PATIENCE)
        return gather_states(self._existing().pieces(), group, keep=to in (None, group.rank()))

    def _may_merge(self, bucket: FlatBucket) -> bool:
        if self._kind is not Kind.ELEMENTS or not is_torchs_own(self._class):
            return False
        key = (bucket.buffer.dtype, bucket.buffer.device)
        if key not in self._merges:
            options = {k: v for k, v in self.param_groups[0].items() if k not in _NOT_OPTIONS}
            self._merges[key] = is_position_independent(self._make, options, *key)
        return self._merges[key]

    def _check_stage(self) -> None:
        if self.stage == 1:
            return
        others = [r for r in self._reducers if r.group is not self.process_group]
        if others or not self._reducers:
            raise OptimizerError(
                "stage=2 reduces gradients in slices, which samestep.DistributedDataParallel over the same "
                "process group does: wrap the model in it first, or use stage=1"
            )

    def _check_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        own_sizes = [len(group["params"]) for group in self.param_groups]
        saved_sizes = [len(group["params"]) for group in saved]
        if own_sizes != saved_sizes:
            raise OptimizerError(
                f"the saved state is of another optimizer: its groups hold {saved_sizes} parameters, this "
                f"one's {own_sizes}. Build it over the same parameters and groups"
            )

    @staticmethod
    def _copy_options(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
        for one, other in zip(source, target, strict=True):
            other.update({key: value for key, value in one.items() if key not in _NOT_OPTIONS})

    # Uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What torch's `Join` runs on ranks without data: they still update their slices."""
        return _StepWithoutData(self)

    @property
    def join_device(self) -> torch.device:
        """The device of this rank."""
        device: torch.device = self._parameters()[0].device
        return device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that join."""
        return self.process_group

    def __getstate__(self) -> dict[str, Any]:
        raise OptimizerError(
            "a sharded optimizer cannot be copied or pickled: its slices belong to their rank. Keep its "
            "state_dict(), or use samestep.checkpoint"
        )


class _StepWithoutData(JoinHook):
    """One optimizer step of the ranks that still have data, for one that has none."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Update this rank's slices with the gradients of the others."""
        optimizer = self._optimizer
        synchronised = sum(reducer.num_backwards for reducer in optimizer._reducers)
        if optimizer._reducers and synchronised == optimizer._num_synchronised:
            return  # they accumulate, and do not step
        optimizer.step()
        optimizer.zero_grad()


def _as_groups(params: Iterable[Any]) -> list[Any]:
    """What an optimizer's constructor takes, so that it may be given twice; groups are copies."""
    found = list(params) if not isinstance(params, Tensor) else params
    return [dict(group) if isinstance(group, dict) else group for group in found]


def _with_names(param_group: dict[str, Any]) -> dict[str, Any]:
    """A complete group as `add_param_group` takes it."""
    names = param_group.get("param_names")
    group = {key: value for key, value in param_group.items() if key != "param_names"}
    group["params"] = list(zip(names, group["params"], strict=True)) if names else list(group["params"])
    return group


def _unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The step without its hooks, global ones above all: they have been called for the outer optimizer."""
    step: Any = type(optimizer).step
    plain = step.__wrapped__ if getattr(step, "hooked", False) else step
    return lambda: plain(optimizer)


def _cast(part: PartState, like: Tensor) -> PartState:
    """The state in the dtypes that torch would load it in; numbers beside it stay exact."""
    tensors = {
        key: tensor.to(
            like.device, like.dtype if tensor.is_floating_point() and like.is_floating_point() else None
        )
        for key, tensor in part.tensors.items()
    }
    return PartState(tensors, part.specs, part.values)
