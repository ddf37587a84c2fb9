"""All ranks succeed, or all raise the same error: nobody waits for a rank that gave up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from samestep import collectives
from samestep.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from samestep.process_group import given_or_default

__all__ = ["agreed", "group_or_world"]

_ERRORS = {kind.__name__: kind for kind in (CheckpointError, CheckpointCorruptError, CheckpointNotFoundError)}


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """`group`, else the world's; None in a world of one, where there is nobody to ask."""
    group = given_or_default(group)
    return group if group is not None and group.size() > 1 else None


def agreed(action: Callable[[], Any], group: dist.ProcessGroup | None) -> list[Any]:
    """What `action()` returned on each rank, JSON-able, in rank order, on every rank.

    Ranks: all of `group`; `action` itself must not communicate, but may fail on any of them.

    Raises:
        CheckpointError: `action` failed somewhere; on every rank the error of the first rank that failed.
    """
    value, failure = None, None
    try:
        value = action()
    except Exception as error:
        failure = error
    own = None if failure is None else _describe(failure)
    if group is None:
        outcomes = [{"value": value, "error": own}]
    else:
        outcomes = collectives.exchange_json({"value": value, "error": own}, group)
    failed = [(rank, outcome["error"]) for rank, outcome in enumerate(outcomes) if outcome["error"]]
    if failed:
        rank, (kind, message) = failed[0]
        prefix = "" if len(failed) == len(outcomes) else f"rank {rank}: "
        if isinstance(failure, CheckpointError) and str(failure) == prefix + message:
            raise failure
        raise _ERRORS[kind](prefix + message) from failure
    return [outcome["value"] for outcome in outcomes]


def _describe(error: Exception) -> tuple[str, str]:
    if isinstance(error, CheckpointError):
        kind = type(error).__name__
        return kind if kind in _ERRORS else CheckpointError.__name__, str(error)
    first_line = str(error).strip().partition("\n")[0]
    return CheckpointError.__name__, f"{type(error).__name__}: {first_line}"
