"""Every exception a user can meet.

Each message is one clear line: what is wrong (rank, parameter, file, value) and what to do about it.
`assert` is for our own bugs.
"""

from __future__ import annotations


class SamestepError(Exception):
    """Base of all that samestep raises on purpose; catch it to catch them all."""


class LaunchError(SamestepError):
    """The command line or the launcher's environment variables make no sense."""


class WorldError(SamestepError, RuntimeError):
    """The world is not there yet, is there already, or is not the one that was asked for."""


class CollectiveError(SamestepError, RuntimeError):
    """A collective failed: a rank died, came too late, left, or called another one."""


class ReplicaMismatchError(SamestepError, RuntimeError):
    """The ranks wrapped models that differ in names, shapes, dtypes or devices."""


class GradientError(SamestepError, RuntimeError):
    """A gradient cannot be synchronised as the script asks; the message says what can."""


class OptimizerError(SamestepError, RuntimeError):
    """An optimizer cannot be sharded as the script asks; the message says what can."""


class NormalizationError(SamestepError, ValueError):
    """A layer cannot normalise what the ranks gave it."""


class DataError(SamestepError, ValueError):
    """A data set, sampler or its saved state does not fit the run."""


class CheckpointError(SamestepError):
    """A checkpoint cannot be written or read."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was asked for."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint's bytes are not those that were written: truncated, altered, or foreign."""


PREEMPTED_STATUS = 75  # EX_TEMPFAIL of sysexits.h: try again later


class Preempted(SystemExit):
    """Ends a script that was asked to end and has saved: exit status 75, "start me again".

    Not an error: a `World` that it leaves is closed in order, which takes all ranks.
    """

    def __init__(self) -> None:
        super().__init__(PREEMPTED_STATUS)
