"""When a collective fails: what was each rank doing? Asked over the group's store, which still answers."""

from __future__ import annotations

import time

import torch.distributed as dist

__all__ = ["what_ranks_were_doing"]

_PATIENCE_S = 2.0
_POLL_S = 0.02


def what_ranks_were_doing(group: dist.ProcessGroup, key: str, mine: str) -> list[str]:
    """A phrase per rank: `mine` here, and what the others say within two seconds.

    Ranks: any for which the collective `key` failed; whoever does not fail says nothing, and is said to be
    somewhere else.
    """
    rank, size = group.rank(), group.size()
    lines = {rank: mine}
    try:
        store = group.get_group_store()
        store.set(f"samestep/doing/{key}/{rank}", mine)
        deadline = time.monotonic() + _PATIENCE_S
        while len(lines) < size and time.monotonic() < deadline:
            for other in range(size):
                name = f"samestep/doing/{key}/{other}"
                if other not in lines and store.check([name]):
                    lines[other] = store.get(name).decode()
            time.sleep(_POLL_S)
    except RuntimeError:
        pass  # the store went with the rank that kept it
    silent = "has ended, or is not in a synchronised backward of this model"
    return [f"rank {r}: {lines.get(r, silent)}" for r in range(size)]
