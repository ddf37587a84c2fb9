"""Agreements that must not be a collective: a rank alone at one would corrupt the others' collectives."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from samestep.errors import GradientError

__all__ = ["meet", "serial_number"]

DEFAULT_PATIENCE = timedelta(minutes=10)


def serial_number(group: dist.ProcessGroup) -> int:
    """How many times this rank has asked for one, from 1: equal on all ranks that ask equally often."""
    return int(group.get_group_store().add(f"samestep/serial/{group.rank()}", 1))


def meet(group: dist.ProcessGroup, key: str, reason: str, *, patience: timedelta = DEFAULT_PATIENCE) -> None:
    """Return when every rank has come to the meeting `key`, over the group's store.

    Ranks: all; `reason` says in a message why this one did.

    Raises:
        GradientError: some did not come within `patience`.
    """
    store = group.get_group_store()
    rank, size = group.rank(), group.size()
    store.set(f"samestep/meeting/{key}/{rank}", reason)
    names = [f"samestep/meeting/{key}/{other}" for other in range(size)]
    try:
        store.wait(names, patience)
    except RuntimeError as error:  # DistStoreError, a time-out
        absent = [other for other, name in enumerate(names) if not store.check([name])]
        raise GradientError(
            f"rank {rank}: {reason}, but not on rank(s) {absent}, which went on without: do it on all ranks "
            "in the same step"
        ) from error
