"""A collective, send or receive in flight, as a generator that says whom it waits for."""

from __future__ import annotations

from collections.abc import Callable, Generator

__all__ = ["Blocked", "Operation", "Progress"]

Blocked = tuple[int, int]  # the rank waited for (-1: any), and the flag's value; a new tuple for each wait
Progress = Generator[Blocked, None, None]


class Operation:
    """What the engine moves on.

    Args:
        what: kind, dtype and shape, for messages.
        sequence: number of the collective; 0 for sends and receives.
        progress: runs until it needs what a peer has not posted yet, and yields.
        deadline: on the monotonic clock.
        needs_all: the death of any peer ends it.
    """

    __slots__ = (
        "_what",
        "blocked",
        "deadline",
        "done",
        "error",
        "needs_all",
        "on_done",
        "progress",
        "sequence",
    )

    def __init__(
        self, what: str, sequence: int, progress: Progress, deadline: float, *, needs_all: bool = True
    ) -> None:
        self._what = what
        self.sequence = sequence
        self.progress = progress
        self.deadline = deadline
        self.needs_all = needs_all
        self.blocked: Blocked | None = None
        self.done = False
        self.error: BaseException | None = None
        self.on_done: list[Callable[[], None]] = []

    @property
    def title(self) -> str:
        """What to call it in messages."""
        return f"collective number {self.sequence} ({self._what})" if self.sequence else self._what
