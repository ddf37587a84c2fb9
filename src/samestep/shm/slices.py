"""Reduce-scatter and all-gather of tensors in shared memory: slices are read straight from where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samestep.errors import CollectiveError
from samestep.shm.exchange import Exchange, Label, pieces
from samestep.shm.heap import NOT_SHARED, Heap
from samestep.shm.operation import Progress
from samestep.shm.reduce import Reduction

__all__ = ["gather_slices", "reduce_slices"]

_CHUNK_BYTES = 256 * 1024


def reduce_slices(
    exchange: Exchange,
    heap: Heap,
    sequence: int,
    label: Label,
    flat: torch.Tensor,
    cuts: Sequence[int],
    reduction: Reduction,
) -> Progress:
    """This rank's slice of `flat` becomes the reduction, along the tree, of all ranks' slices there.

    What lies outside of the own slice stays this rank's own; peers read it until this is done.
    """
    yield from _meet(exchange, heap, sequence, label, flat)
    tensors = yield from exchange.shared(sequence, exchange.places(sequence)[0], flat)
    rank = exchange.rank
    start, stop = cuts[rank], cuts[rank + 1]
    length = _CHUNK_BYTES // flat.dtype.itemsize
    scratch = [torch.empty(min(length, stop - start), dtype=flat.dtype) for _ in range(reduction.num_scratch)]
    for first, last in pieces(stop - start, length):
        if first < last:
            operands = [tensor[start + first : start + last] for tensor in tensors]
            reduction.into(operands[rank], operands, [s[: last - first] for s in scratch])
    exchange.post(sequence, 2)
    yield from exchange.wait(sequence, 2)
    exchange.finish(sequence)


def gather_slices(
    exchange: Exchange, heap: Heap, sequence: int, label: Label, flat: torch.Tensor, cuts: Sequence[int]
) -> Progress:
    """Each rank's slice of `flat` becomes that rank's."""
    yield from _meet(exchange, heap, sequence, label, flat)
    tensors = yield from exchange.shared(sequence, exchange.places(sequence)[0], flat)
    for peer, tensor in enumerate(tensors):
        if peer != exchange.rank and cuts[peer] < cuts[peer + 1]:
            flat[cuts[peer] : cuts[peer + 1]].copy_(tensor[cuts[peer] : cuts[peer + 1]])
    exchange.post(sequence, 2)
    yield from exchange.wait(sequence, 2)
    exchange.finish(sequence)


def _meet(exchange: Exchange, heap: Heap, sequence: int, label: Label, flat: torch.Tensor) -> Progress:
    """All ranks have come, and know where everyone's tensor lies."""
    exchange.pass_turn(sequence)
    yield from exchange.slot_free(sequence)
    exchange.describe(sequence, label, place=heap.place(flat))
    exchange.post(sequence, 1)
    yield from exchange.wait(sequence, 1)
    exchange.check(sequence, label)
    places, num_private = exchange.places(sequence)
    if num_private:
        raise CollectiveError(
            f"{label.text}: that of {exchange.name(places.index(NOT_SHARED))} is not from empty_shared()"
        )
