"""Will the run go on with the same bits? What it depends on, as it was saved, against what is here."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from samestep.arithmetic import differences
from samestep.process_group import given_or_default
from samestep.virtual import virtual_ranks

__all__ = ["fixed_virtual_size", "same_bits_notes"]


def fixed_virtual_size(process_group: dist.ProcessGroup | None) -> int | None:
    """V, if the run of `process_group` (default: of the world) is defined by virtual ranks."""
    group = given_or_default(process_group)
    virtual = None if group is None else virtual_ranks(group)
    return virtual.virtual_size if virtual is not None and virtual.is_fixed else None


def same_bits_notes(written_by: Any, virtual_size: int | None, where: str) -> list[str]:
    """A sentence for each thing that will make bits differ, if both runs are defined by virtual ranks.

    Without virtual ranks nothing is promised, and nothing said.

    Args:
        written_by: what the checkpoint holds under that name.
        virtual_size: of the run that loads, if it is fixed.
        where: the checkpoint, for the sentences.
    """
    saved = written_by.get("virtual_size") if isinstance(written_by, dict) else None
    if saved is None or virtual_size is None:
        return []
    notes = []
    if saved != virtual_size:
        notes.append(
            f"{where} is of a run of virtual_size={saved}, and this world has {virtual_size}: from here on "
            "it is another run"
        )
    changed = differences(written_by)
    if changed:
        notes.append(
            f"{where}: {'; '.join(changed)}. From here on the bits of the run may be others than if it had "
            "stayed where it was"
        )
    return notes
