"""ShardedOptimizer: each rank keeps and updates its slice of everything (ZeRO, Rajbhandari et al. 2020)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable

from samestep.errors import OptimizerError
from samestep.gradients.meeting import serial_number
from samestep.gradients.reducer import Reducer, reducer_of
from samestep.optim.exchange import verify_alike
from samestep.optim.flat import FlatBucket
from samestep.optim.groups import NOT_OPTIONS, as_groups, copy_options, number_parameters, with_names
from samestep.optim.kinds import Kind, is_torchs_own, kind_of
from samestep.optim.layout import CACHED
from samestep.optim.plan import plan_layouts
from samestep.optim.position import is_position_independent, unhooked_step
from samestep.optim.saving import Saving
from samestep.optim.shards import Shards
from samestep.optim.sliced_norm import clip_gradients
from samestep.optim.state import WholeStates
from samestep.optim.uneven import UnevenSteps, agree_on_options
from samestep.process_group import default_group

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(Saving, torch.optim.Optimizer, UnevenSteps):
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
        self._reducer_refs: list[weakref.ref[Reducer]] = []  # they go with their wrapper
        self._num_synchronised = 0
        self._num_meetings = 0
        self._consolidated: tuple[int, dict[int, dict[str, Any]]] | None = None
        self._merges: dict[tuple[torch.dtype, torch.device], bool] = {}
        # The class itself checks its arguments and completes the groups, over the parameters as they are.
        template = self._make(as_groups(params))
        if any(group.get("differentiable") for group in template.param_groups):
            raise OptimizerError("differentiable=True needs every update in a graph: use the plain optimizer")
        Joinable.__init__(self)
        torch.optim.Optimizer.__init__(
            self, [with_names(g) for g in template.param_groups], template.defaults
        )
        found = self._find_reducers()
        self.process_group = process_group or (found[0].group if found else default_group())
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
        self._update()
        return loss

    def _update(self, *, active: bool = True) -> None:
        """A step without what surrounds it. `active`: this rank still has data."""
        shards = self._settled()
        self._consolidated = None
        if self._join_config.enable:
            agree_on_options(self, active=active)
        copy_options(self.param_groups, shards.inner.param_groups)
        scaling = [name for name in ("grad_scale", "found_inf") if hasattr(self, name)]
        for name in scaling:  # from GradScaler, for fused optimizers
            setattr(shards.inner, name, getattr(self, name))
        try:
            shards.update(unhooked_step(shards.inner))
        finally:
            for name in scaling:
                delattr(shards.inner, name)
        copy_options(shards.inner.param_groups, self.param_groups)
        self._num_synchronised = self._count_synchronised()

    def _count_synchronised(self) -> int:
        return sum(reducer.num_backwards for reducer in self._reducers)

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
        super().add_param_group(with_names(completed))
        self._find_reducers()
        self._lay_out(before)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """The norm of all gradients as one vector; they are scaled down so that it is `max_norm` at most.

        At stage 1 `samestep.clip_grad_norm_`; at stage 2 summed over slices, in float64: then the last bits
        depend on the number of ranks.

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
        self._existing().gather_gradients()

    @property
    def state_bytes(self) -> int:
        """The size of the optimizer state that this rank keeps."""
        return self._existing().state_bytes

    # Inside

    def _make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return self._class(groups, **self._class_options)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _existing(self) -> Shards:
        assert self._shards is not None
        return self._shards

    def _find_reducers(self) -> list[Reducer]:
        found: dict[int, Reducer] = {}
        for parameter in self._parameters():
            reducer = reducer_of(parameter)
            if reducer is not None:
                found[id(reducer)] = reducer
        for reducer in found.values():
            self._names.update({id(slot.param): slot.name for slot in reducer.slots})
        self._reducer_refs = [weakref.ref(reducer) for reducer in found.values()]
        return list(found.values())

    @property
    def _reducers(self) -> list[Reducer]:
        """Those that synchronise the parameters, or did when they were laid out."""
        return [reducer for ref in self._reducer_refs if (reducer := ref()) is not None]

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
            longest=CACHED if self._works_in_passes() else None,
            one_by_one=is_torchs_own(self._class),
        )
        if states:
            groups = number_parameters(self.param_groups)
            whole = WholeStates({"state": states, "param_groups": groups}, [p.shape for p in parameters])
            self._fill(self._shards, whole)
        for reducer in self._reducers:
            if not any(found() is self for found in reducer.sharded_by):
                reducer.sharded_by.append(weakref.ref(self))
            if self.stage == 2:
                reducer.scatter(
                    {
                        plan.source.index: plan.layout.cuts
                        for plan in planned
                        if plan.source in reducer.queue.buckets
                        and len(plan.source.slots) == len(plan.layout.parameters)
                    }
                )

    def _settled(self) -> Shards:
        """The shards, laid out anew if the wrapper has planned its buckets anew. Ranks: all."""
        shards = self._existing()
        known = self._reducers
        loose = [p for b in shards.buckets if b.source is None for p in b.parameters if p.requires_grad]
        is_current = len(known) == len(self._reducer_refs) and not any(reducer.closed for reducer in known)
        if is_current and all(reducer_of(p) in (None, *known) for p in loose):
            return shards
        shards.gather_gradients()  # where they are in slices: those cuts are no more
        before = self._whole_states()
        self._find_reducers()
        self._lay_out(before)
        return self._existing()

    def _works_in_passes(self) -> bool:
        """Whether one step is many passes over each tensor, which had better stay in a CPU's cache."""
        devices = {p.device.type for p in self._parameters()}
        at_once = any(group.get("fused") or group.get("foreach") for group in self.param_groups)
        return devices == {"cpu"} and not at_once

    def _may_merge(self, bucket: FlatBucket) -> bool:
        if self._kind is not Kind.ELEMENTS or not is_torchs_own(self._class):
            return False
        key = (bucket.buffer.dtype, bucket.buffer.device)
        if key not in self._merges:
            options = {k: v for k, v in self.param_groups[0].items() if k not in NOT_OPTIONS}
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

    def __getstate__(self) -> dict[str, Any]:
        raise OptimizerError(
            "a sharded optimizer cannot be copied or pickled: its slices belong to their rank. Keep its "
            "state_dict(), or use samestep.checkpoint"
        )
