"""The objects in a checkpoint: what of them is saved, whether it fits them later, and putting it back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from samestep.errors import CheckpointError
from samestep.gradients import DistributedDataParallel

__all__ = [
    "apply",
    "buckets_of",
    "capture",
    "check_fit",
    "follow_buckets",
    "is_loadable",
    "order_of_applying",
    "unwrap",
]

_WRAPPERS = (DistributedDataParallel, nn.parallel.DistributedDataParallel, nn.DataParallel)
_PREFIX = "module."
_NUM_NAMES_SHOWN = 5


def unwrap(target: Any) -> Any:
    """The model inside its wrappers (ours, torch's, torch.compile's): its names have no prefix."""
    while True:
        if isinstance(target, _WRAPPERS):
            target = target.module
        elif isinstance(target, nn.Module) and isinstance(getattr(target, "_orig_mod", None), nn.Module):
            target = target._orig_mod
        else:
            return target


def buckets_of(target: Any) -> list[list[str]] | None:
    """The names in each bucket of a wrapped model's gradients: how its sums over the ranks are cut."""
    if not isinstance(target, DistributedDataParallel):
        return None
    plan = target.bucket_plan
    return [plan.names(bucket) for bucket in range(len(plan.buckets))]


def follow_buckets(name: str, target: Any, saved: Any) -> list[str]:
    """A wrapped `target` sums its gradients in the `saved` buckets from now on; else a note that says why."""
    if saved is None or not isinstance(target, DistributedDataParallel):
        return []
    is_listing = isinstance(saved, list) and all(
        isinstance(bucket, list) and bucket and all(isinstance(item, str) for item in bucket)
        for bucket in saved
    )
    plan = target.bucket_plan.regrouped(saved) if is_listing else None
    if plan is None:
        return [f"{name!r} trains other parameters than when it was saved: its buckets are made anew"]
    if plan != target.bucket_plan:
        target.use_bucket_plan(plan)
    return []


def capture(target: Any) -> Any:
    """What to save of `target`: its `state_dict()` if it has one, else itself."""
    target = unwrap(target)
    return target.state_dict() if callable(getattr(target, "state_dict", None)) else target


def is_loadable(target: Any) -> bool:
    """Whether saved state goes into `target`; a plain value is returned instead."""
    return callable(getattr(unwrap(target), "load_state_dict", None))


def check_fit(name: str, target: Any, saved: Any, *, strict: bool) -> None:
    """Raise a `CheckpointError` if `saved` cannot go into `target`; nothing is changed."""
    target = unwrap(target)
    if isinstance(target, nn.Module):
        _check_module(name, target, saved, strict=strict)
    elif isinstance(target, torch.optim.Optimizer):
        _check_optimizer(name, target, saved)


def order_of_applying(target: Any) -> int:
    """Small objects, which check their state themselves, go first; what `check_fit` has passed goes last."""
    target = unwrap(target)
    return 2 if isinstance(target, nn.Module) else 1 if isinstance(target, torch.optim.Optimizer) else 0


def apply(name: str, target: Any, saved: Any, *, strict: bool) -> None:
    """`saved` is `target`'s state."""
    target = unwrap(target)
    try:
        if isinstance(target, nn.Module):
            target.load_state_dict(_without_prefix(saved, target.state_dict()), strict=strict)
        else:
            target.load_state_dict(saved)
        if isinstance(target, torch.optim.Optimizer):
            _restore_dtypes(target, saved)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{name!r} does not take its saved state: {first_line}") from error


def _without_prefix(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """`saved` with the bare model's names, if a wrapper's state_dict() was saved as a plain dict."""
    if not saved or any(key.startswith(_PREFIX) for key in own):
        return saved
    if not all(key.startswith(_PREFIX) for key in saved):
        return saved
    bare = OrderedDict((key.removeprefix(_PREFIX), value) for key, value in saved.items())
    metadata = getattr(saved, "_metadata", None)
    if metadata is not None:
        versions = {k.removeprefix(_PREFIX): v for k, v in metadata.items() if k.startswith(_PREFIX)}
        bare._metadata = versions  # type: ignore[attr-defined]
    return bare


def _check_module(name: str, module: nn.Module, saved: Any, *, strict: bool) -> None:
    if not isinstance(saved, Mapping) or not all(isinstance(key, str) for key in saved):
        raise CheckpointError(f"{name!r} in the checkpoint is not the state of a model")
    own = module.state_dict()
    saved = _without_prefix(saved, own)
    problems = []
    if strict:
        problems += _listing("missing in the checkpoint", [key for key in own if key not in saved])
        problems += _listing("unknown to the model", [key for key in saved if key not in own])
    shapes, dtypes = [], []
    for key, value in own.items():
        other = saved.get(key)
        if not isinstance(value, torch.Tensor) or key not in saved or nn.parameter.is_lazy(value):
            continue
        if not isinstance(other, torch.Tensor):
            shapes.append(f"{key} (saved: {type(other).__name__})")
        elif other.shape != value.shape:
            shapes.append(f"{key} (saved: {list(other.shape)}, model: {list(value.shape)})")
        elif strict and other.dtype != value.dtype:
            dtypes.append(f"{key} (saved: {_short(other.dtype)}, model: {_short(value.dtype)})")
    problems += _listing("of another shape", shapes) + _listing("of another dtype", dtypes)
    if problems:
        hint = "; strict=False loads the rest" if strict and not shapes else ""
        raise CheckpointError(
            f"{name!r} in the checkpoint is not of this model: {'; '.join(problems)}. Build the model that "
            f"was saved{hint}"
        )


def _check_optimizer(name: str, optimizer: torch.optim.Optimizer, saved: Any) -> None:
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if not isinstance(groups, list) or "state" not in saved:
        raise CheckpointError(f"{name!r} in the checkpoint is not the state of an optimizer")
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group.get("params", ())) if isinstance(group, Mapping) else -1 for group in groups]
    if own_sizes != saved_sizes:
        raise CheckpointError(
            f"{name!r} in the checkpoint is of another optimizer: its parameter groups hold {saved_sizes} "
            f"parameters, this one's {own_sizes}. Build the optimizer over the same parameters and groups"
        )


def _restore_dtypes(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Undo what torch's `load_state_dict` did to state of another dtype than its parameter's: it casts it.

    NAdam and ASGD keep float32 numbers beside bfloat16 parameters; cast, they would not be the saved bits.
    """
    names = [name for group in saved["param_groups"] for name in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        for key, value in saved["state"].get(name, {}).items():
            loaded = optimizer.state[parameter].get(key)
            both = isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor)
            if both and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def _listing(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NUM_NAMES_SHOWN} more" if len(names) > _NUM_NAMES_SHOWN else ""
    return [f"{what}: {', '.join(names[:_NUM_NAMES_SHOWN])}{more}"]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
