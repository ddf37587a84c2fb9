"""Inside of a join block: collectives that layers make within forward and backward, followed round by round.

[Note: Rounds]
A SyncBatchNorm communicates in the middle of a forward and of its backward. A rank that has run out of data
does not know how many such collectives the others' step will have, nor in which order. So inside of the
block each of them is one *round* of equal size, whose row also says what it is: this layer's, the end of the
step, or that the rank has raised. A rank without data takes part with a row of zeros and learns from the
others' what to do. Buckets go out after the step's last round, not in between, where the follower would not
expect them.

    active ranks:   forward: round(bn1) round(bn2)   backward: round(bn2) round(bn1) round(end)   buckets
    the others:     follow:  round      round                  round      round      round        stand by
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from samestep import collectives
from samestep.errors import GradientError

__all__ = ["CollectiveLayer", "Rounds"]

_HEADER_BYTES = 2 * 8


class CollectiveLayer:
    """A mix-in for modules that communicate inside of their forward or backward."""

    rounds: Rounds | None = None  # inside of a join block: what to communicate through

    def round_bytes(self) -> int:
        """The most bytes that a rank sends in one of its collectives."""
        raise NotImplementedError

    def collective_group(self) -> dist.ProcessGroup | None:
        """The ranks that it communicates with; None if it does not communicate."""
        raise NotImplementedError

    def follow(self, rows: list[Tensor]) -> None:
        """Take note of a collective of the other ranks, in which this one took part with zeros.

        It must not raise: the other ranks would wait.
        """
        raise NotImplementedError


class _Says(enum.IntEnum):
    FOLLOWING = 0
    LAYER = 1
    END = 2  # of the step
    RAISED = 3


class Rounds:
    """The rounds of one join block.

    Ranks: all, as the note above shows: those with data `open` each step and `end_step` it, the others
    `follow`.

    Args:
        layers: by name, in the same order on all ranks.
        group: the ranks that join.
        device: this rank's.

    Raises:
        GradientError: a layer communicates with other ranks than those that join.
    """

    def __init__(
        self, layers: Mapping[str, CollectiveLayer], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        for name, layer in layers.items():
            if layer.collective_group() not in (None, group):
                raise GradientError(
                    f"{name} ({type(layer).__name__}) has another process group than the module around it: "
                    "inside of join() it must have the same one, or none"
                )
        self.is_open = False  # between the first and last round of a step that this rank has data for
        self.is_void = False  # the block ended on all ranks, in the middle of a step
        self.closes_early = False  # any backward's end ends the step, not only a synchronised one's
        self._names = list(layers)
        self._layers = list(layers.values())
        self._group = group
        self._device = collectives.wire_device(device, group)
        self._row_bytes = _HEADER_BYTES + max(layer.round_bytes() for layer in self._layers)
        for layer in self._layers:
            layer.rounds = self

    def close(self) -> None:
        """The block is over: layers communicate by themselves again."""
        for layer in self._layers:
            layer.rounds = None

    def open(self) -> None:
        """A step of this rank begins."""
        self.is_open = True

    def all_gather(self, layer: CollectiveLayer, row: Tensor) -> list[Tensor]:
        """The `row` of every rank, in rank order, longer than it was by some zeros.

        Ranks: all with data, for the same layer.
        """
        index = next(i for i, known in enumerate(self._layers) if known is layer)
        if not self.is_open:
            raise GradientError(
                f"inside of join(), {self._names[index]} ({type(layer).__name__}, in training mode) ran "
                "outside of a step, which begins with the wrapper's forward and ends with its backward: the "
                "ranks without data cannot follow"
            )
        return self._round(_Says.LAYER, index, row)[1]

    def backward_ended(self, *, synchronised: bool) -> None:
        """This rank's backward is over, and its buckets are next if it is `synchronised`."""
        if synchronised or self.closes_early:
            self.end_step()

    def end_step(self) -> None:
        """The step has no more rounds. Nothing happens if it had ended before.

        Ranks: all with data.
        """
        if self.is_open:
            self._round(_Says.END)
            self.is_open = False

    def follow(self) -> None:
        """Take part in one step of the other ranks.

        Ranks: those without data.

        Raises:
            GradientError: another rank has raised, or the others do not agree on what they do.
        """
        while True:
            index, rows = self._round(_Says.FOLLOWING)
            if index is None:
                return
            self._layers[index].follow(rows)

    def give_up(self) -> None:
        """This rank has raised within a step; the others learn it in their next round."""
        self.is_open, self.is_void = False, True
        self._gather(_Says.RAISED, 0, None)

    def _round(
        self, says: _Says, index: int = 0, row: Tensor | None = None
    ) -> tuple[int | None, list[Tensor]]:
        """(the layer whose round it is, None at the end of a step; all ranks' rows)."""
        was_open, self.is_open = self.is_open, False  # should the collective fail, nobody is told any more
        headers, rows = self._gather(says, index, row)
        raised = [rank for rank, header in enumerate(headers) if header[0] == _Says.RAISED]
        said = {rank: header for rank, header in enumerate(headers) if header[0] != _Says.FOLLOWING}
        self.is_void = bool(raised) or len(set(said.values())) != 1
        if raised:
            raise GradientError(f"rank {raised[0]} raised inside of join(); its own error says why")
        if self.is_void:
            told = "; ".join(f"rank {rank}: {self._describe(*header)}" for rank, header in said.items())
            raise GradientError(f"inside of join(), the ranks do not run the same layers: {told}")
        self.is_open = was_open
        says_all, index_all = next(iter(said.values()))
        return (index_all if says_all == _Says.LAYER else None), rows

    def _gather(
        self, says: _Says, index: int, row: Tensor | None
    ) -> tuple[list[tuple[int, int]], list[Tensor]]:
        mine = torch.zeros(self._row_bytes, dtype=torch.uint8, device=self._device)
        mine[:_HEADER_BYTES].view(torch.int64).copy_(torch.tensor([says, index]))
        if row is not None:
            mine[_HEADER_BYTES : _HEADER_BYTES + row.numel()] = row
        rows = collectives.all_gather(mine, self._group)
        headers = torch.stack([r[:_HEADER_BYTES].view(torch.int64) for r in rows]).tolist()
        return [(says, index) for says, index in headers], [r[_HEADER_BYTES:] for r in rows]

    def _describe(self, says: int, index: int) -> str:
        return f"in {self._names[index]}" if says == _Says.LAYER else "at the end of its backward"
