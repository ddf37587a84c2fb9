"""How a step's samples are dealt to virtual ranks and their micro-batches: pure arithmetic on positions.

[Note: Dealing] A step takes up to V * A * B units from the order, beginning at some position: V virtual
ranks, A micro-batches each (accumulation), B units per micro-batch. Unit number j of the step goes to virtual
rank j % V, as `DistributedSampler` deals to ranks; each virtual rank cuts its units, in order, in
micro-batches. A *unit* is a sample; with a batch sampler, or batches that come ready-made, it is a batch, and
B is 1.

Only an epoch's last step can be short, and the mode says what happens then:

- "exact": its units are dealt as they are. Shares differ by one unit at most, and so do micro-batches. All
  virtual ranks have equally many micro-batches, so that they communicate alike: one that would be empty is
  filled with the first unit of the step, which does not count (`num_counted` is 0).
- "pad": units are repeated from the beginning of the step, fewer than V, so that all shares are equal.
- "drop": it is left out.

"evaluate" is another way of dealing, to processes instead of virtual ranks: batches of consecutive units, in
turn. Processes that are left without one at the end have one batch less.

[Note: Weights] The mean of a step is sum(loss of sample) / N over its N samples. A micro-batch of n samples
yields its own mean; the reducer adds up the V virtual ranks' gradients and divides by V. So each micro-batch
counts with the weight n * V / N: exactly 1 in a full step without accumulation, 1 / A with it, 0 for a
filler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["LoaderMode", "MicroBatch", "StepPlan", "StepShape"]

LoaderMode = Literal["exact", "pad", "drop", "evaluate"]


@dataclass(frozen=True)
class MicroBatch:
    """The units of one forward and backward of one virtual rank: their numbers in the step.

    Padding goes beyond the step's last unit: it begins again with the first one.
    """

    virtual_rank: int
    index: int  # among the micro-batches of its virtual rank in this step
    offsets: range
    num_counted: int  # units that count in the step's mean: all, or none if it is a filler


@dataclass(frozen=True)
class StepShape:
    """What all full steps have in common."""

    virtual_size: int
    batch_size: int
    accumulation: int = 1
    mode: LoaderMode = "exact"

    @property
    def num_units(self) -> int:
        """Units of a full step: the global batch."""
        return self.virtual_size * self.accumulation * self.batch_size

    def num_steps(self, num_units: int) -> int:
        """The number of steps that `num_units` make."""
        full, rest = divmod(num_units, self.num_units)
        return full + (1 if self.plan(rest) else 0)

    def plan(self, num_units: int) -> StepPlan | None:
        """The step made of the first ones of `num_units` units; None if they make no step."""
        num_units = min(num_units, self.num_units)
        if num_units == 0 or (self.mode == "drop" and num_units < self.num_units):
            return None
        return StepPlan(self, num_units)


@dataclass(frozen=True)
class StepPlan:
    """One step of `num_units` units, dealt to all virtual ranks."""

    shape: StepShape
    num_units: int

    @property
    def num_dealt(self) -> int:
        """Units that count, repeated ones included."""
        if self.shape.mode == "pad":
            return -(-self.num_units // self.shape.virtual_size) * self.shape.virtual_size
        return self.num_units

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each virtual rank."""
        longest = -(-self.num_units // self.shape.virtual_size)
        return -(-longest // self.shape.batch_size)

    def micro_batches(self, virtual_ranks: range) -> Iterator[MicroBatch]:
        """Those of `virtual_ranks`, one virtual rank after the other."""
        for virtual_rank in virtual_ranks:
            if self.shape.mode == "evaluate":
                start = virtual_rank * self.shape.batch_size
                batch = range(start, min(start + self.shape.batch_size, self.num_units))
                if batch:
                    yield MicroBatch(virtual_rank, 0, batch, len(batch))
                continue
            share = range(virtual_rank, self.num_dealt, self.shape.virtual_size)
            for index in range(self.num_micro_batches):
                part = _part(share, index, self.num_micro_batches)
                yield MicroBatch(virtual_rank, index, part or range(1), len(part))


def _part(whole: range, index: int, num_parts: int) -> range:
    """Part number `index` of `whole` cut in `num_parts` contiguous parts, the longer ones first."""
    length, num_longer = divmod(len(whole), num_parts)
    start = index * length + min(index, num_longer)
    return whole[start : start + length + (index < num_longer)]
