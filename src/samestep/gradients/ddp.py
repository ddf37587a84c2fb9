"""DistributedDataParallel: a module whose replicas on all ranks take the same step."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parameter import UninitializedParameter

from samestep.errors import GradientError
from samestep.gradients.buckets import BucketPlan, ParameterInfo, plan_buckets
from samestep.gradients.hooks import CommunicationHook, check_hook
from samestep.gradients.join import JoinBlock, ReplicaJoinHook, announce
from samestep.gradients.outputs import map_tensors, tensors_in
from samestep.gradients.reducer import REDUCTIONS, Reducer
from samestep.gradients.replicas import broadcast_tensors, verify_replicas
from samestep.world import default_group

__all__ = ["DistributedDataParallel"]

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # the attribute that torch's own helpers set
_current_task = torch._C._current_graph_task_id


class DistributedDataParallel(nn.Module, Joinable):
    """A module whose gradients, after each backward, are the average over all ranks.

    Takes the place of `torch.nn.parallel.DistributedDataParallel`; every argument of torch's class is
    accepted. Unused parameters, graphs that change, re-entrant checkpointing and several forwards per
    backward need no flag here: whether and what to synchronise is decided in backward.

    Ranks: all construct it, in the same order as their other collectives, over models of the same
    parameters; rank 0's values go to all. Each backward outside of `no_sync()` is a collective. A forward
    is one only in training mode with gradients enabled, if the module has buffers.

    Memory: buckets of the size of all gradients; `param.grad` are views of them. While a bucket is
    reduced, its parameters' gradients change under way: use them after `backward()` has returned.

    Args:
        module: the replica; its parameters' devices are where this rank computes.
        device_ids: `[device]` moves the inputs to that accelerator. Not with a CPU module.
        output_device: where outputs go; default `device_ids[0]`.
        dim: ignored; torch has it.
        broadcast_buffers: torch's older name of `forward_sync_buffers`, which at False also leaves
            buffers out of the first broadcast.
        init_sync: compare the replicas and send rank 0's parameters and buffers to all.
        process_group: the ranks; default: the world.
        bucket_cap_mb: size of the buckets in MiB; default 25, and 1 for the first.
        find_unused_parameters: do not wait for parameters that this backward will not reach: buckets that
            hold them go out earlier. Nothing else depends on it.
        check_reduction: ignored; torch has it.
        gradient_as_bucket_view: gradients are always views of the buckets.
        static_graph: promise that each backward fires as the first did: re-entrant checkpoints overlap too.
        delay_all_reduce_named_params: these are reduced with all others.
        param_to_hook_all_reduce: as above.
        mixed_precision: torch's `_MixedPrecision`: dtypes of parameters, reduction and buffers.
        device_mesh: a one-dimensional mesh, instead of `process_group`.
        skip_all_reduce_unused_params: accepted; unused parameters cost a place in a bucket.
        bucket_cap_mb_list: the size of each bucket in turn; the last one holds for all that follow.
        batched_grad_copy: buckets with many small gradients are always filled at once.
        forward_sync_buffers: send rank 0's buffers to all in the first forward of each training step.
        reduction: "mean" over ranks, "sum", or "weighted": the mean over all items that the ranks counted
            (`weigh`, `count_items`).

    Raises:
        GradientError: the module has no parameter to train, or arguments contradict each other.
        ReplicaMismatchError: the ranks wrapped different models; the message shows the differences.
        WorldError: there is no process group yet.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        if reduction not in REDUCTIONS:
            raise GradientError(f"reduction={reduction!r}: it must be one of {', '.join(REDUCTIONS)}")
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise GradientError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time"
            )
        self.process_group = _group_from(process_group, device_mesh)
        self.module = module
        self.parameters_to_ignore: set[str] = set(getattr(module, _IGNORED, ()))
        _check_parameters(module, self.parameters_to_ignore)
        self.device_ids, self.output_device = _devices_from(module, device_ids, output_device)
        self.device = next(p.device for _, p in self._managed())
        self.dim = dim
        sync_buffers, first_sync_buffers = _buffer_knobs(broadcast_buffers, forward_sync_buffers)
        self.forward_sync_buffers = sync_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self.reduction = reduction
        self.bucket_cap_mb = bucket_cap_mb
        self.bucket_cap_mb_list = list(bucket_cap_mb_list) if bucket_cap_mb_list is not None else None
        self._buffers_due = True
        self._join_divides_by_initial = True
        self._hook: tuple[Any, CommunicationHook] | None = None
        self._make_reducer(verify=init_sync)
        if init_sync:
            self._sync_states(src=0, buffers=first_sync_buffers)

    # Training

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the module returns for these inputs; the backward through it will be synchronised."""
        training = torch.is_grad_enabled()
        if training and _current_task() < 0:  # not when a re-entrant checkpoint computes it again
            self._before_forward()
        if self.device_ids:
            inputs, kwargs = self._moved(inputs, self.device_ids[0]), self._moved(kwargs, self.device_ids[0])
        output = self.module(*inputs, **kwargs)
        if training:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    self._reducer.watch_output(tensor)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside of the block accumulate this rank's gradients; none is synchronised.

        The next backward outside of it synchronises all that was accumulated; so does `sync_gradients()`.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def sync_gradients(self) -> None:
        """What backwards under `no_sync()` have accumulated is averaged now, without another backward.

        Ranks: all; one that has accumulated nothing contributes nothing.
        """
        self._reducer.synchronise_now()

    def weigh(self, loss: Tensor, items: int) -> Tensor:
        """The mean `loss` of a micro-batch of `items` items, weighted so that big batches count for more.

        With `reduction="weighted"`, gradients are those of the mean over all items of all ranks and
        micro-batches since the last synchronised backward:

            model.weigh(loss, num_tokens).backward()
        """
        self._reducer.count_items(items)
        return loss * items

    def count_items(self, items: int) -> None:
        """The micro-batch at hand counted `items` items; for a loss that is a sum over them."""
        self._reducer.count_items(items)

    def sync_buffers(self) -> None:
        """Every rank holds rank 0's buffers.

        Ranks: all.
        """
        self._sync_buffers_now(src=0)

    def register_comm_hook(self, state: object, hook: CommunicationHook) -> None:
        """Full buckets go to `hook(state, bucket)`, which returns a future of the averaged gradients.

        torch's hooks (`torch.distributed.algorithms.ddp_comm_hooks`) run unchanged. A hook divides by the
        number of ranks by itself.

        Ranks: all, with the same hook, before the first backward.

        Raises:
            GradientError: there is a hook already, or this one cannot be called so.
        """
        if self._hook is not None:
            raise GradientError("register_comm_hook can only be called once: there is a hook already")
        check_hook(hook)
        self._hook = (state, hook)
        self._reducer.set_hook(state, hook)

    # Uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> JoinBlock:
        """A block inside of which ranks may run different numbers of batches.

        Ranks: all enter and leave it. One that raises inside ends the block on all.

        Args:
            divide_by_initial_world_size: gradients are divided by the number of all ranks, else by the
                number of those that still have data.
            enable: False makes the block do nothing.
            throw_on_early_termination: raise on all ranks when the first one runs out of data.
        """
        return JoinBlock(
            self,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What torch's `Join` runs on ranks without data."""
        divide = kwargs.get("divide_by_initial_world_size", True)
        return ReplicaJoinHook(self, divide_by_initial_world_size=divide)

    @property
    def join_device(self) -> torch.device:
        """The device of this rank."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that join."""
        return self.process_group

    # Looking in

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward will be synchronised."""
        return self._reducer.synchronise

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._reducer.synchronise = value

    @property
    def bucket_plan(self) -> BucketPlan:
        """Which parameter's gradient travels in which bucket; `print` it."""
        return self._reducer.plan

    def statistics(self) -> dict[str, Any]:
        """Counts, bytes and seconds of what was reduced so far, on this rank."""
        return self._reducer.statistics()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """torch's name for `statistics()`."""
        return self.statistics()

    def _set_static_graph(self) -> None:
        """torch's way to promise a static graph after construction."""
        self.static_graph = True
        self._reducer.static_graph = True

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Sequence[str]) -> None:
        """Parameters and buffers of these names are left alone when `module` is wrapped: torch's API."""
        setattr(module, _IGNORED, list(names))

    # Inside

    def _managed(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters to train, by name, in the order of registration; tied ones once."""
        ignored = self.parameters_to_ignore
        return [(n, p) for n, p in self.module.named_parameters() if p.requires_grad and n not in ignored]

    def _managed_buffers(self) -> list[Tensor]:
        return [b for n, b in self.module.named_buffers() if n not in self.parameters_to_ignore]

    def _make_reducer(self, *, verify: bool) -> None:
        managed = self._managed()
        infos = _describe(self.module, managed)
        if verify:
            verify_replicas(infos, self.process_group)
        plan = plan_buckets(infos, cap_mb=self.bucket_cap_mb, caps_mb=self.bucket_cap_mb_list)
        self._reducer = Reducer(
            plan,
            [p for _, p in managed],
            self.process_group,
            reduction=self.reduction,
            static_graph=self.static_graph,
            release_unused=self.find_unused_parameters,
        )
        if self._hook is not None:
            self._reducer.set_hook(*self._hook)
        self._reducer.on_synchronised.append(self._on_synchronised)
        self._tables = [m._parameters for m in self.module.modules()]
        self._children = [m._modules for m in self.module.modules()]
        self._signature = self._signature_now()

    def _signature_now(self) -> list[object]:
        """Changes when a parameter is frozen, thawed, added, removed or replaced; cheap to compute."""
        found: list[object] = [
            (id(p), p.requires_grad) for table in self._tables for p in table.values() if p is not None
        ]
        found.append([len(children) for children in self._children])
        return found

    def _on_synchronised(self) -> None:
        self._buffers_due = True

    def _before_forward(self) -> None:
        self._reducer.settle()
        if not self._reducer.running and self._signature_now() != self._signature:
            self._replan()
        src = 0
        if self._join_config.enable:
            src = self._announce_step()
        if self.training and self.forward_sync_buffers and self._buffers_due:
            self._buffers_due = False
            self._sync_buffers_now(src=src)

    def _replan(self) -> None:
        """Parameters were frozen, thawed, added or removed since the last forward, on all ranks alike."""
        known = {id(slot.param) for slot in self._reducer.slots}
        synchronise = self._reducer.synchronise
        self._reducer.close()
        _check_parameters(self.module, self.parameters_to_ignore)
        self._make_reducer(verify=True)
        self._reducer.synchronise = synchronise
        new = [p for _, p in self._managed() if id(p) not in known]
        broadcast_tensors(new, self.process_group)

    def _sync_states(self, *, src: int, buffers: bool) -> None:
        ignored = self.parameters_to_ignore
        tensors: list[Tensor] = [p for n, p in self.module.named_parameters() if n not in ignored]
        if buffers:
            tensors += self._managed_buffers()
        broadcast_tensors(tensors, self.process_group, src=src)

    def _sync_buffers_now(self, *, src: int) -> None:
        broadcast_tensors(self._managed_buffers(), self.process_group, src=src)

    def _moved(self, value: Any, device: torch.device) -> Any:
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), value)

    def _announce_step(self) -> int:
        Join.notify_join_context(self)
        facts = announce(self, active=True, synchronise=self.require_backward_grad_sync)
        self._set_join_divisor(facts.num_active)
        return facts.first_active

    def _set_join_divisor(self, num_active: int) -> None:
        size = self.process_group.size()
        self._reducer.divisor = size if self._join_divides_by_initial else num_active

    def _leave_join(self) -> None:
        self._reducer.divisor = self.process_group.size()

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("process_group", "_reducer", "_tables", "_children", "_signature"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = default_group()
        self._make_reducer(verify=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        group, hook = self.process_group, self._hook
        state = {k: copy.deepcopy(v, memo) for k, v in self.__getstate__().items() if k != "_hook"}
        nn.Module.__setstate__(twin, state)
        twin.process_group, twin._hook = group, hook
        twin._make_reducer(verify=False)
        return twin


def _group_from(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    if device_mesh is None:
        return process_group if process_group is not None else default_group()
    if process_group is not None:
        raise GradientError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise GradientError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return group


def _check_parameters(module: nn.Module, ignored: set[str]) -> None:
    trained = False
    for name, parameter in module.named_parameters():
        if name in ignored:
            continue
        if isinstance(parameter, UninitializedParameter):
            raise GradientError(
                f"{name} is not initialised yet: run a dummy forward pass before wrapping the model"
            )
        trained = trained or parameter.requires_grad
    if not trained:
        raise GradientError(
            f"{type(module).__name__} has no parameter to train: DistributedDataParallel is not needed "
            "when a module doesn't have any parameter that requires a gradient"
        )


def _devices_from(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[torch.device] | None, torch.device | None]:
    devices = {p.device for p in module.parameters()}
    kinds = {device.type for device in devices}
    if len(kinds) != 1:
        raise GradientError(
            "DistributedDataParallel's input module must be on the same type of devices, but its parameters "
            f"are on {', '.join(sorted(kinds))}"
        )
    if not device_ids and output_device is None:
        return None, None
    if device_ids is not None and len(device_ids) > 1:
        raise GradientError("device_ids can only be None or contain a single element.")
    kind = kinds.pop()
    if kind == "cpu" or len(devices) > 1:
        raise GradientError(
            f"device_ids={device_ids} and output_device={output_device} are for a module on one accelerator, "
            f"but its parameters are on {', '.join(sorted(map(str, devices)))}: drop them"
        )
    inputs = [_device(kind, d) for d in device_ids or ()]
    outputs = _device(kind, output_device) if output_device is not None else inputs[0]
    return inputs or None, outputs


def _device(kind: str, device: int | torch.device) -> torch.device:
    return torch.device(kind, device) if isinstance(device, int) else torch.device(device)


def _buffer_knobs(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """(in each training step, at the start)"""
    if forward_sync_buffers is not None:
        if broadcast_buffers is not None:
            warnings.warn(
                "broadcast_buffers is ignored, since forward_sync_buffers says the same more exactly",
                FutureWarning,
                stacklevel=3,
            )
        return forward_sync_buffers, True
    each = True if broadcast_buffers is None else broadcast_buffers
    return each, each


def _describe(module: nn.Module, managed: list[tuple[str, nn.Parameter]]) -> list[ParameterInfo]:
    sparse = {
        id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse
    }
    places = {device: i for i, device in enumerate(dict.fromkeys(p.device for _, p in managed))}
    return [
        ParameterInfo(
            name=name,
            shape=tuple(p.shape),
            stride=tuple(p.stride()),
            dtype=str(p.dtype).removeprefix("torch."),
            device=p.device.type,
            item_bytes=p.element_size(),
            sparse=id(p) in sparse,
            place=places[p.device],
        )
        for name, p in managed
    ]
