"""What a backward is for: whose gradient it yields, and what becomes of it.

[Note: Three roles] Under `no_sync()` a backward accumulates. Else it yields the gradient of the virtual rank
that is being played, or of one of its micro-batches. It is kept until the process's last virtual rank has
had its turn, whose backward then makes the gradients the same on all ranks. A process that plays one
virtual rank need not say which: every backward is the last one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from samestep.gradients import refusals
from samestep.gradients.bucket import Slot
from samestep.virtual import Turn, VirtualRanks

__all__ = ["Role", "Turns"]


class Role(enum.Enum):
    """What becomes of the gradients of a backward."""

    ACCUMULATE = enum.auto()  # they stay in param.grad
    KEEP = enum.auto()  # they wait along the tree
    REDUCE = enum.auto()  # they become the same on all ranks


class Turns:
    """The turns of one reducer: which backward it is in, and which parameters were used in the step.

    Args:
        virtual: the group's.
        slots: the reducer's.
    """

    def __init__(self, virtual: VirtualRanks, slots: Sequence[Slot]) -> None:
        self.virtual = virtual
        self.role = Role.ACCUMULATE
        self.turn: Turn | None = None
        self._slots = slots
        self._next = (virtual.block.start, 0)  # virtual rank and micro-batch whose gradient is to come
        self._accumulated_in: tuple[object, ...] | None = None
        self.reset()

    def reset(self) -> None:
        """A step begins."""
        self._next = (self.virtual.block.start, 0)
        self._accumulated_in = None
        self._counts = [0] * len(self._slots)  # virtual ranks that have used each parameter
        self._used = [False] * len(self._slots)  # whether earlier micro-batches of this one have

    def begin(self, *, synchronise: bool) -> Role:
        """A backward begins; its role.

        Raises:
            GradientError: nobody says whose gradient it will be, or it is not that one's turn.
        """
        virtual, turn = self.virtual, self.virtual.current
        if turn is None and not virtual.is_single:
            raise refusals.nobody_plays(virtual)
        whose = None if turn is None else (turn.step, turn.position)
        if self._accumulated_in not in (None, whose) and not virtual.is_single:
            self.reset()
            raise refusals.left_unsynchronised(virtual)
        self.turn = turn
        if not synchronise:
            self.role, self._accumulated_in = Role.ACCUMULATE, whose
            return self.role
        if turn is not None and virtual.is_fixed and (turn.position, turn.micro_batch) != self._next:
            missing = self._next
            self.reset()
            raise refusals.out_of_turn(turn, missing)
        if virtual.is_fixed and self.is_first:
            refusals.drop_stale(self._slots)
        self.role = Role.REDUCE if turn is None or turn.is_last else Role.KEEP
        return self.role

    @property
    def is_first(self) -> bool:
        """Whether nothing of the step has been kept yet."""
        return self._next == (self.virtual.block.start, 0)

    @property
    def weight(self) -> float:
        """What the gradient at hand counts for in a mean over virtual ranks."""
        return 1.0 if self.turn is None else self.turn.weight

    @property
    def ends_virtual_rank(self) -> bool:
        """Whether the gradient at hand is its virtual rank's last."""
        return self.turn is None or self.turn.ends_virtual_rank

    def kept(self) -> None:
        """The gradients at hand wait in the tree."""
        assert self.turn is not None
        self._accumulated_in = None
        for slot in self._slots:
            self._used[slot.index] |= slot.used
            slot.used = False
        if self.turn.ends_virtual_rank:
            self._counts = self._num_used()
            self._used = [False] * len(self._slots)
            self._next = (self.turn.position + 1, 0)
        else:
            self._next = (self.turn.position, self.turn.micro_batch + 1)

    def num_used(self) -> list[int]:
        """How many virtual ranks have used each parameter, the one at hand included."""
        for slot in self._slots:
            self._used[slot.index] |= slot.used
        return self._num_used()

    def _num_used(self) -> list[int]:
        return [count + used for count, used in zip(self._counts, self._used, strict=True)]
