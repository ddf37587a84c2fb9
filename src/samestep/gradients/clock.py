"""When the parts of a synchronised backward began and ended, on this rank, in nanoseconds."""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["Clock"]


@dataclass
class Clock:
    """Host times of the last step and their sums; 0 where nothing of the kind has happened yet."""

    forward_start_ns: int = 0
    backward_start_ns: int = 0
    communication_start_ns: int = 0
    communication_end_ns: int = 0
    backward_end_ns: int = 0
    sum_forward_ns: int = 0
    sum_backward_ns: int = 0
    sum_communication_ns: int = 0
    sum_overlap_ns: int = 0
    sum_wait_ns: int = 0
    num_steps: int = 0

    def forward_began(self) -> None:
        """A training forward begins."""
        self.forward_start_ns = time.perf_counter_ns()

    def backward_began(self) -> None:
        """The first hook of a synchronised backward fires."""
        self.backward_start_ns = time.perf_counter_ns()
        self.communication_start_ns = 0

    def launched(self) -> None:
        """A bucket goes out."""
        if not self.communication_start_ns:
            self.communication_start_ns = time.perf_counter_ns()

    def backward_ended(self) -> None:
        """All gradients of this rank are there."""
        self.backward_end_ns = time.perf_counter_ns()

    def synchronised(self) -> None:
        """All buckets are back."""
        self.communication_end_ns = end = time.perf_counter_ns()
        self.communication_start_ns = start = self.communication_start_ns or self.backward_end_ns
        if self.forward_start_ns:
            self.sum_forward_ns += max(0, self.backward_start_ns - self.forward_start_ns)
        self.sum_backward_ns += self.backward_end_ns - self.backward_start_ns
        self.sum_communication_ns += end - start
        self.sum_overlap_ns += max(0, self.backward_end_ns - start)
        self.sum_wait_ns += end - self.backward_end_ns
        self.num_steps += 1
