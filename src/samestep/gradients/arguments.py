"""What the wrapper's arguments mean, checked: group, devices, buffers, and the parameters to train."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedParameter

from samestep.errors import GradientError
from samestep.gradients.buckets import ParameterInfo
from samestep.process_group import default_group

__all__ = [
    "buffer_knobs",
    "check_parameters",
    "describe_parameters",
    "devices_from",
    "group_from",
    "ignored_names",
    "parameter_infos",
]

IGNORED = "_ddp_params_and_buffers_to_ignore"  # the attribute that torch's own helpers set


def ignored_names(module: nn.Module) -> set[str]:
    """The names of parameters and buffers that `module` asks to be left alone."""
    return set(getattr(module, IGNORED, ()))


def group_from(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    """The group that one of the two names; the world by default."""
    if device_mesh is None:
        return process_group if process_group is not None else default_group()
    if process_group is not None:
        raise GradientError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise GradientError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return group


def check_parameters(module: nn.Module, ignored: set[str]) -> None:
    """Return if `module` has something to train, all of it initialised and on one type of device."""
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
            f"{type(module).__name__} has no parameter to train: DistributedDataParallel is not needed when "
            "a module doesn't have any parameter that requires a gradient"
        )
    kinds = {p.device.type for n, p in module.named_parameters() if n not in ignored}
    if len(kinds) != 1:
        raise GradientError(
            "DistributedDataParallel's input module must be on the same type of devices, but its parameters "
            f"are on {', '.join(sorted(kinds))}"
        )


def devices_from(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[torch.device] | None, torch.device | None]:
    """(where inputs go, where outputs go); None: where they are."""
    if not device_ids and output_device is None:
        return None, None
    if device_ids is not None and len(device_ids) > 1:
        raise GradientError("device_ids can only be None or contain a single element.")
    devices = {p.device for p in module.parameters()}
    kind = next(iter(devices)).type
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


def buffer_knobs(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether buffers are sent (in each training step, at the start)."""
    if broadcast_buffers is not None:
        warnings.warn(
            "broadcast_buffers is deprecated in torch: use forward_sync_buffers, which wins if both are "
            "given and leaves the broadcast at the start alone",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    each = True if broadcast_buffers is None else broadcast_buffers
    return each, each


def describe_parameters(
    module: nn.Module, managed: Sequence[tuple[str, nn.Parameter]]
) -> list[ParameterInfo]:
    """What the plan needs to know of each parameter of `managed`, all of them `module`'s."""
    sparse = {
        id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse
    }
    return parameter_infos(managed, sparse)


def parameter_infos(
    named: Sequence[tuple[str, nn.Parameter]], sparse: Collection[int] = ()
) -> list[ParameterInfo]:
    """What the plan needs to know of each parameter; `sparse`: ids of those with sparse gradients."""
    places = {device: i for i, device in enumerate(dict.fromkeys(p.device for _, p in named))}
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
        for name, p in named
    ]
