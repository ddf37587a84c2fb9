"""Checkpoints: written by rank 0, whole or not at all; verified when read; nothing pickled.

    samestep.checkpoint.save("runs/digits", {"model": model, "optimizer": optimizer}, step=step)
    samestep.checkpoint.load("runs/digits", {"model": model, "optimizer": optimizer})

docs/checkpoint-format.md describes the files.
"""

from __future__ import annotations

from samestep.checkpoint.files import Files
from samestep.checkpoint.load import Loaded, load
from samestep.checkpoint.save import save
from samestep.checkpoint.scan import latest

__all__ = ["Files", "Loaded", "latest", "load", "save"]
