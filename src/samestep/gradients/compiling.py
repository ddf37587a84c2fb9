"""torch.compile beside the wrapper: [Note: torch.compile].

Hooks and collectives are no part of a graph: Dynamo is to trace the module inside of the wrapper, not the
wrapper. `torch.compiler.disable` would say so, but it imports all of Dynamo (seconds); these marks say it to
the part of Dynamo that is always there.

Inside, the graph must be cut where our buckets end: compiled whole, the backward would be one call, all
gradients would arrive at its end, and nothing would overlap. Dynamo cuts for the wrapper that it finds in
one slot, an attribute of torch's class, and reads `bucket_bytes_cap` from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

__all__ = ["CutAtBuckets", "trace_callees_only", "untraced"]

F = TypeVar("F", bound=Callable[..., Any])
_Action = eval_frame._FrameAction
_MIB = 1024 * 1024


def untraced(fn: F) -> F:
    """`fn`, which Dynamo runs as it stands, and all that it calls."""
    return _marked(fn, _Action.SKIP)


def trace_callees_only(fn: F) -> F:
    """`fn`, which Dynamo runs as it stands, tracing what it calls."""
    return _marked(fn, _Action.DEFAULT)


def _marked(fn: F, callees: Any) -> F:
    strategy = eval_frame._FrameExecStrategy(_Action.SKIP, callees)
    eval_frame.set_code_exec_strategy(fn.__code__, strategy)
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    return fn


@dataclass(frozen=True)
class _Active:
    bucket_bytes_cap: int


class CutAtBuckets:
    """While it is entered, graphs are cut for buckets of `cap_bytes`; at least 1 MiB, as Dynamo wants."""

    def __init__(self, cap_bytes: int) -> None:
        self._active = _Active(max(cap_bytes, _MIB))
        self._before: Any = None

    @untraced
    def __enter__(self) -> None:
        slot = torch.nn.parallel.DistributedDataParallel
        self._before = slot._active_ddp_module
        slot._active_ddp_module = self._active  # type: ignore[assignment]

    @untraced
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        torch.nn.parallel.DistributedDataParallel._active_ddp_module = self._before
