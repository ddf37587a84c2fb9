"""Will the run go on with the same bits? What it depends on, as it was saved, against what is here."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from samestep.arithmetic import differences
from samestep.virtual import virtual_ranks

__all__ = ["same_bits_notes"]


def same_bits_notes(written_by: Any, group: dist.ProcessGroup | None, where: str) -> list[str]:
    """A sentence for each thing that will make bits differ, if both runs are defined by virtual ranks.

    Without virtual ranks nothing is promised, and nothing said.

    Args:
        written_by: what the checkpoint holds under that name.
        group: the ranks that load.
        where: the checkpoint, for the sentences.
    """
    virtual = None if group is None else virtual_ranks(group)
    if virtual is None or not virtual.is_fixed or not isinstance(written_by, dict):
        return []
    saved = written_by.get("virtual_size")
    if saved is None:
        return []
    notes = []
    if saved != virtual.virtual_size:
        notes.append(
            f"{where} is of a run of virtual_size={saved}, and this world has {virtual.virtual_size}: from "
            "here on it is another run"
        )
    changed = differences(written_by)
    if changed:
        notes.append(
            f"{where}: {'; '.join(changed)}. From here on the bits of the run may be others than if it had "
            "stayed where it was"
        )
    return notes
