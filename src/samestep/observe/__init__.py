"""Seeing what a run does: progress."""

from samestep.observe.bars import Progress, progress

__all__ = ["Progress", "progress"]
