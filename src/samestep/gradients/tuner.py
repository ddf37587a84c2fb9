"""`bucket_cap_mb="auto"`: tries bucket sizes in the first steps and keeps the one with the fastest steps."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from samestep import collectives

__all__ = ["CapTuner"]

CANDIDATES_MB = (25.0, 5.0, 10.0, 50.0, 100.0, 2.0)
_STEPS_EACH = 7  # the first two of which, with cold buckets, do not count
_COLD_STEPS = 2


class CapTuner:
    """Decides after at most 42 synchronised backwards; all ranks then keep the same size.

    Args:
        total_mb: size of all gradients; no larger bucket is tried.
        group: the ranks.
    """

    def __init__(
        self,
        total_mb: float,
        group: dist.ProcessGroup,
        *,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        fitting = [cap for cap in CANDIDATES_MB if cap < total_mb]
        self._candidates = [*fitting, CANDIDATES_MB[-2]] if len(fitting) < len(CANDIDATES_MB) else fitting
        self._group = group
        self._clock_s = clock_s
        self._medians_s: list[float] = []
        self._steps_s: list[float] = []
        self._last: float | None = None
        self.cap_mb = self._candidates[0]  # to be used now
        self.settled = len(self._candidates) == 1

    def after_backward(self) -> bool:
        """A step is done; whether `cap_mb` has changed.

        Ranks: all, after each synchronised backward; it is a collective when the last size was tried.
        """
        now = self._clock_s()
        if self._last is not None:
            self._steps_s.append(now - self._last)
        self._last = now
        if self.settled or len(self._steps_s) < _STEPS_EACH:
            return False
        self._medians_s.append(sorted(self._steps_s[_COLD_STEPS:])[(_STEPS_EACH - _COLD_STEPS) // 2])
        self._steps_s = []
        self._last = None
        before = self.cap_mb
        if len(self._medians_s) < len(self._candidates):
            self.cap_mb = self._candidates[len(self._medians_s)]
        else:
            self.cap_mb = self._agree()
            self.settled = True
        return self.cap_mb != before

    def _agree(self) -> float:
        # A step takes as long as on its slowest rank.
        slowest = torch.tensor(self._medians_s, dtype=torch.float64)
        slowest = slowest.to(collectives.device_of(self._group))
        collectives.all_reduce(slowest, self._group, op=dist.ReduceOp.MAX).wait()
        return self._candidates[int(slowest.argmin())]
