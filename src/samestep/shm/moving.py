"""Collectives that move data between ranks, and reduce-scatter: rounds through the stages.

Two patterns serve them all. `share`: each rank shows one stream, and whoever wants it reads it (broadcast,
all-gather, gather). `deal`: each rank shows one stream per peer (scatter, all-to-all, reduce-scatter).
All tensors are flat and dense here; group.py sees to that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from samestep.errors import CollectiveError
from samestep.shm.exchange import Exchange, Label
from samestep.shm.operation import Progress
from samestep.shm.reduce import Reduction
from samestep.shm.region import CACHE_LINE

__all__ = ["barrier", "deal", "reduce_scatter", "share"]

_SIZE_BYTES = 8
_NOTHING = torch.empty(0, dtype=torch.uint8)


def barrier(exchange: Exchange, sequence: int, label: Label) -> Progress:
    """Done when all ranks have joined."""
    return exchange.rounds(sequence, label, 1, _pass, _pass)


def share(
    exchange: Exchange,
    sequence: int,
    label: Label,
    mine: torch.Tensor | None,
    outs: Sequence[torch.Tensor | None],
) -> Progress:
    """`outs[r]` becomes what rank r shows, where this rank wants it.

    Args:
        exchange: of the group.
        sequence: number of the collective.
        label: what must agree.
        mine: what this rank shows, as bytes; None for nothing.
        outs: one per rank, as bytes; None where this rank does not want it.
    """
    rank = exchange.rank
    mine = _NOTHING if mine is None else mine
    length = exchange.stage_bytes

    def fill(index: int, stage: int) -> None:
        start, stop = _cut(index, length, mine.numel())
        if start < stop:
            exchange.stage(rank, stage, torch.uint8, 0, stop - start).copy_(mine[start:stop])

    def drain(index: int, stage: int) -> None:
        for peer, out in enumerate(outs):
            if out is None:
                continue
            if index == 0:
                _check_size(exchange, peer, exchange.num_bytes(sequence, peer), out.numel())
            start, stop = _cut(index, length, out.numel())
            if peer == rank:
                if out.data_ptr() != mine.data_ptr():
                    out[start:stop].copy_(mine[start:stop])
            elif start < stop:
                out[start:stop].copy_(exchange.stage(peer, stage, torch.uint8, 0, stop - start))

    num_rounds = max(1, -(-mine.numel() // length))
    return exchange.rounds(sequence, label, num_rounds, fill, drain, num_bytes=mine.numel())


def deal(
    exchange: Exchange,
    sequence: int,
    label: Label,
    parts: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
) -> Progress:
    """`outs[r]` becomes the part that rank r has for this rank.

    Args:
        exchange: of the group.
        sequence: number of the collective.
        label: what must agree.
        parts: what this rank has for each, as bytes.
        outs: what it expects from each, as bytes.
    """

    def take(peer: int, start: int, stop: int, shown: torch.Tensor) -> None:
        outs[peer][start:stop].copy_(shown)

    return _deal(exchange, sequence, label, parts, [out.numel() for out in outs], take)


def reduce_scatter(
    exchange: Exchange,
    sequence: int,
    label: Label,
    parts: Sequence[torch.Tensor],
    out: torch.Tensor,
    reduction: Reduction,
) -> Progress:
    """`out` becomes the reduction of the parts that all ranks have for this rank.

    Args:
        exchange: of the group.
        sequence: number of the collective.
        label: what must agree.
        parts: what this rank has for each, of one dtype.
        out: of that dtype; may share the memory of this rank's own part.
        reduction: along the tree.
    """
    num_ranks = exchange.num_ranks
    operands: list[torch.Tensor] = [_NOTHING] * num_ranks
    longest = min(out.numel(), _share_bytes(exchange) // out.itemsize)
    scratch = exchange.scratch(reduction.num_scratch, out.dtype, longest)

    def take(peer: int, start: int, stop: int, shown: torch.Tensor) -> None:
        operands[peer] = shown
        if peer == num_ranks - 1:
            reduction.into(out[start:stop], operands, [s[: stop - start] for s in scratch])

    return _deal(exchange, sequence, label, parts, [out.numel()] * num_ranks, take)


def _deal(
    exchange: Exchange,
    sequence: int,
    label: Label,
    parts: Sequence[torch.Tensor],
    expected: Sequence[int],
    take: Callable[[int, int, int, torch.Tensor], None],
) -> Progress:
    """Show each peer its part in a share of the stage; `take(peer, start, stop, shown)` what ranks show.

    It is called for all ranks in order, this one included. The first round starts with the sizes of the
    parts, in elements.
    """
    rank, num_ranks = exchange.rank, exchange.num_ranks
    dtype = parts[0].dtype
    share_bytes = _share_bytes(exchange)
    length = share_bytes // dtype.itemsize
    sizes = torch.tensor([part.numel() for part in parts])

    def place(peer: int) -> int:
        return _table_bytes(num_ranks) + peer * share_bytes

    def fill(index: int, stage: int) -> None:
        if index == 0:
            exchange.stage(rank, stage, torch.int64, 0, num_ranks).copy_(sizes)
        for peer, part in enumerate(parts):
            start, stop = _cut(index, length, part.numel())
            if peer != rank and start < stop:
                exchange.stage(rank, stage, dtype, place(peer), stop - start).copy_(part[start:stop])

    def drain(index: int, stage: int) -> None:
        for peer in range(num_ranks):
            if index == 0:
                size = int(exchange.stage(peer, stage, torch.int64, 0, num_ranks)[rank])
                _check_size(exchange, peer, size, expected[peer])
            start, stop = _cut(index, length, expected[peer])
            if start == stop:
                continue
            if peer == rank:
                shown = parts[rank][start:stop]
            else:
                shown = exchange.stage(peer, stage, dtype, place(rank), stop - start)
            take(peer, start, stop, shown)

    longest = max(part.numel() for part in parts)
    return exchange.rounds(sequence, label, max(1, -(-longest // length)), fill, drain)


def _table_bytes(num_ranks: int) -> int:
    return -(-num_ranks * _SIZE_BYTES // CACHE_LINE) * CACHE_LINE


def _share_bytes(exchange: Exchange) -> int:
    """Of one peer in a stage: what the table of sizes leaves, in whole cache lines."""
    free = exchange.stage_bytes - _table_bytes(exchange.num_ranks)
    return free // exchange.num_ranks // CACHE_LINE * CACHE_LINE


def _cut(index: int, length: int, numel: int) -> tuple[int, int]:
    """The elements of round `index`."""
    return min(index * length, numel), min((index + 1) * length, numel)


def _check_size(exchange: Exchange, peer: int, sent: int, expected: int) -> None:
    if sent != expected:
        raise CollectiveError(
            f"{exchange.name(peer)} sends {exchange.name(exchange.rank)} {sent} bytes or elements where "
            f"{expected} are expected: give the ranks tensors of matching sizes"
        )


def _pass(index: int, stage: int) -> None:
    pass
