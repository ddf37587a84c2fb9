"""torch's own names: what scripts, torch's hooks and torch's tests reach for on its wrapper.

Nothing here is needed by our own code; each method says in our terms what torch's name asks for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from samestep.errors import GradientError
from samestep.gradients.arguments import IGNORED, ignored_names
from samestep.gradients.buckets import DEFAULT_CAP_MB
from samestep.gradients.hooks import GradBucket
from samestep.gradients.replicas import broadcast_tensors
from samestep.gradients.rounds import CollectiveLayer

if TYPE_CHECKING:
    from samestep.gradients.ddp import DistributedDataParallel

__all__ = ["TorchNames", "TorchReducer"]

_MIB = 1024 * 1024
_BUILTIN_HOOKS: dict[str, Any] = {
    "ALLREDUCE": default_hooks.allreduce_hook,
    "FP16_COMPRESS": default_hooks.fp16_compress_hook,
}


class TorchReducer:
    """What torch's hooks ask of `model.reducer`."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    def _run_allreduce_hook(self, bucket: GradBucket) -> Future[Any]:
        return self._model.process_group.allreduce([bucket.buffer()]).get_future()

    def _get_local_used_map(self) -> Tensor:
        return torch.tensor(self._model._reducer.num_used, dtype=torch.int32)

    def _ddp_graph_static(self) -> bool:
        return self._model._reducer.is_static


class TorchNames:
    """A mix-in of `DistributedDataParallel`."""

    logger: Any = None
    broadcast_bucket_size = 250 * _MIB
    _error: str | None = None
    _sample_rate = 100
    _join_used = False
    _authoritative_rank = 0

    @property
    def reducer(self: DistributedDataParallel) -> TorchReducer:  # type: ignore[misc]
        """The parts of torch's reducer that Python code calls."""
        return TorchReducer(self)

    @property
    def broadcast_buffers(self: DistributedDataParallel) -> bool:  # type: ignore[misc]
        """torch's older name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @property
    def bucket_bytes_cap(self: DistributedDataParallel) -> int:  # type: ignore[misc]
        """The size of a bucket in bytes."""
        cap = self._tuner.cap_mb if self._tuner is not None else self.bucket_cap_mb
        return int((DEFAULT_CAP_MB if cap is None else float(cap)) * _MIB)

    @property
    def bucket_bytes_cap_list(self: DistributedDataParallel) -> list[int]:  # type: ignore[misc]
        """The size of each bucket in bytes, where a list was given."""
        return [int(cap * _MIB) for cap in self.bucket_cap_mb_list or ()]

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Sequence[str]) -> None:
        setattr(module, IGNORED, list(names))
        both: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name in names:
            if name in both:
                both[name]._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        ignored = getattr(module, "parameters_to_ignore", None) or ignored_names(module)
        inner: Any = module.module if isinstance(module, TorchNames) else module
        for name, parameter in inner.named_parameters():
            if name not in ignored:
                yield (name, parameter) if named_params else parameter

    def _set_static_graph(self: DistributedDataParallel) -> None:  # type: ignore[misc]
        if self.static_graph:
            return
        if self._reducer.num_backwards:
            with self._errors_noted():
                raise GradientError("_set_static_graph() should be called before training loop starts")
        self.static_graph = self._reducer.static_graph = True

    def _set_ddp_sink_clone(self, value: bool) -> None:
        """Outputs are never cloned here."""

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self._sample_rate = rate

    def _remove_autograd_hooks(self: DistributedDataParallel) -> None:  # type: ignore[misc]
        self._reducer.close()

    def _register_builtin_comm_hook(self: DistributedDataParallel, kind: Any) -> None:  # type: ignore[misc]
        self.register_comm_hook(None, _BUILTIN_HOOKS[kind.name])
        self._builtin_hook = str(kind)

    def _register_buffer_comm_hook(  # type: ignore[misc]
        self: DistributedDataParallel, state: Any, hook: Any, comm_hook_location: Any = None, **location: Any
    ) -> None:
        where = location.get("hook_location", comm_hook_location)
        after = where is None or getattr(where, "name", "") == "POST_FORWARD"
        self._buffer_sync.set_hook(state, hook, after_forward=after)

    def _default_broadcast_coalesced(  # type: ignore[misc]
        self: DistributedDataParallel, bufs: Any = None, bucket_size: Any = None, authoritative_rank: int = 0
    ) -> None:
        buffers = list(bufs) if bufs is not None else list(self._buffer_sync.named_buffers().values())
        broadcast_tensors(buffers, self.process_group, src=authoritative_rank)

    def _build_params_for_reducer(self: DistributedDataParallel) -> tuple[list[Any], list[bool]]:  # type: ignore[misc]
        plan = self.bucket_plan
        sparse = set(plan.sparse)
        return [slot.param for slot in self._reducer.slots], [
            i in sparse for i in range(len(plan.parameters))
        ]

    def _build_debug_param_to_name_mapping(  # type: ignore[misc]
        self: DistributedDataParallel, parameters: Sequence[Any]
    ) -> dict[int, str]:
        if dist.get_debug_level() == dist.DebugLevel.OFF:
            return {}
        names = {id(p): name for name, p in self._managed()}
        given = {id(p) for p in parameters}
        if len(given) > len(names):
            raise ValueError(
                f"Expected param to name mapping to have {len(given)} entries, but {len(names)} are trained"
            )
        for key, name in names.items():
            if key not in given:
                raise ValueError(f"Param with name {name} is trained by this model, but was not given")
        return {i: names[id(p)] for i, p in enumerate(parameters)}

    @contextlib.contextmanager
    def _errors_noted(self) -> Iterator[None]:
        """An error raised inside shows in the logging data too."""
        try:
            yield
        except Exception as error:
            self._error = str(error)
            raise

    def _get_ddp_logging_data(self: DistributedDataParallel) -> dict[str, Any]:  # type: ignore[misc]
        """`statistics()` under torch's field names, those that mean something here."""
        reducer, clock = self._reducer, self._reducer.clock
        plan, steps = reducer.plan, max(1, clock.num_steps)
        error = self._error or reducer.error
        in_order = [reducer.queue.buckets[i] for i in reducer.queue.order]
        data: dict[str, Any] = {
            "world_size": self.process_group.size(),
            "rank": self.process_group.rank(),
            "module_name": type(self.module).__name__,
            "device_ids": ", ".join(str(d.index) for d in self.device_ids or ()),
            "output_device": -1 if self.output_device is None else self.output_device.index,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "forward_sync_buffers": int(self.forward_sync_buffers),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "can_set_static_graph": reducer.is_static,
            "backend_name": self.process_group.name(),
            "iteration": reducer.num_backwards,
            "dtypes": ", ".join(sorted({_torch_dtype_name(p.dtype) for p in plan.parameters})),
            "total_parameter_size_bytes": sum(p.bytes for p in plan.parameters),
            "num_parameter_tensors": len(plan.parameters),
            "bucket_sizes": ", ".join(str(plan.bucket_bytes(b.index)) for b in in_order),
            "num_buckets_reduced": len(in_order) + len(plan.sparse),
            "has_sync_bn": any(
                isinstance(m, (nn.SyncBatchNorm, CollectiveLayer)) for m in self.module.modules()
            ),
            "join_uneven_inputs": self._join_used,
            "has_error": error is not None,
            "unused_parameter_size": reducer.unused_bytes,
            "forward_compute_time_start": clock.forward_start_ns,
            "backward_compute_time_start": clock.backward_start_ns,
            "backward_compute_time_end": clock.backward_end_ns,
            "backward_comm_time_start": clock.communication_start_ns,
            "backward_comm_time_end": clock.communication_end_ns,
            "forward_compute_time": max(0, clock.backward_start_ns - clock.forward_start_ns),
            "backward_compute_time": clock.backward_end_ns - clock.backward_start_ns,
            "backward_comm_time": clock.communication_end_ns - clock.communication_start_ns,
            "backward_compute_comm_overlap_time": max(
                0, clock.backward_end_ns - clock.communication_start_ns
            ),
            "avg_forward_compute_time": clock.sum_forward_ns // steps,
            "avg_backward_compute_time": clock.sum_backward_ns // steps,
            "avg_backward_comm_time": clock.sum_communication_ns // steps,
            "avg_backward_compute_comm_overlap_time": clock.sum_overlap_ns // steps,
            "torch_distributed_debug": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "N/A"),
        }
        if error is not None:
            data["error"] = error
        if self._hook is not None:
            hook = self._hook[1]
            data["comm_hook"] = getattr(self, "_builtin_hook", getattr(hook, "__qualname__", repr(hook)))
        return data


def _torch_dtype_name(dtype: str) -> str:
    return {"float32": "float", "float64": "double", "float16": "c10::Half"}.get(dtype, dtype)
