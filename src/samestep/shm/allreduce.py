"""All-reduce, three ways: at once if small, in slices through stages, or in place in shared memory.

Every way sums along the tree. Elements are independent of each other, and each is summed once, or by
everybody in the same order: all ranks hold equal bits.
"""

from __future__ import annotations

import torch

from samestep.shm.engine import Progress
from samestep.shm.exchange import Exchange, Label, copy_bytes, pieces
from samestep.shm.heap import Heap
from samestep.shm.reduce import Reduction
from samestep.shm.region import CACHE_LINE

__all__ = ["AllReduce"]

_SMALL_BYTES = 64 * 1024
_CHUNK_BYTES = 256 * 1024


class AllReduce:
    """All-reduces of one shape, dtype and operation: what they have in common is prepared once.

    Args:
        exchange: of the group.
        heap: of the group.
        label: what must agree between ranks.
        reduction: the operation.
        shape: of the tensors.
        dtype: of the tensors.
    """

    def __init__(
        self,
        exchange: Exchange,
        heap: Heap,
        label: Label,
        reduction: Reduction,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> None:
        self._exchange = exchange
        self._heap = heap
        self.label = label
        self._reduction = reduction
        self.premultiplies = reduction.name == "PREMUL_SUM"
        self._dtype = dtype
        self._shape = shape
        self._numel = shape.numel()
        self._num_bytes = self._numel * dtype.itemsize
        self._scratch = [
            torch.empty(min(self._numel, _CHUNK_BYTES // dtype.itemsize), dtype=dtype)
            for _ in range(reduction.num_scratch)
        ]
        self._small = self._num_bytes <= min(_SMALL_BYTES, exchange.stage_bytes)
        self._shaped: dict[int, tuple[torch.Tensor, ...]] = {}
        self._shaped_scratch = [s[: self._numel].view(shape) for s in self._scratch] if self._small else []

    def progress(self, sequence: int, tensor: torch.Tensor) -> Progress:
        """Collective number `sequence`: `tensor`, contiguous, becomes the reduction over all ranks."""
        return self._at_once(sequence, tensor) if self._small else self._large(sequence, tensor.view(-1))

    def _at_once(self, sequence: int, tensor: torch.Tensor) -> Progress:
        """One round: everybody shows the whole tensor, everybody reduces all of it."""
        exchange = self._exchange
        yield from exchange.turn(sequence)
        yield from exchange.announce(sequence, self.label)
        stage = exchange.next_stage()
        copy_bytes(exchange.stage_address(stage), tensor.data_ptr(), self._num_bytes)
        exchange.post(sequence, 1)
        yield from exchange.wait(sequence, 1)
        exchange.check(sequence, self.label)
        operands = self._shaped.get(stage)
        if operands is None:
            operands = self._shaped[stage] = tuple(
                exchange.stage(rank, stage, self._dtype, 0, self._numel).view(self._shape)
                for rank in range(exchange.num_ranks)
            )
        self._reduction.into(tensor, operands, self._shaped_scratch)
        exchange.finish(sequence)

    def _large(self, sequence: int, flat: torch.Tensor) -> Progress:
        """See first where everyone's tensor lies, then choose the way; all choose the same."""
        exchange = self._exchange
        yield from exchange.announce(sequence, self.label, place=self._heap.place(flat))
        exchange.post(sequence, 1)
        yield from exchange.wait(sequence, 1)
        exchange.check(sequence, self.label)
        places = exchange.places(sequence)
        if places is None:
            yield from exchange.turn(sequence)
            yield from self._through_stages(sequence, flat)
        else:
            exchange.pass_turn(sequence)
            self._in_place(exchange.shared(sequence, places, flat))
            exchange.post(sequence, 2)
            yield from exchange.wait(sequence, 2)
        exchange.finish(sequence)

    def _in_place(self, tensors: list[torch.Tensor]) -> None:
        """Reduce this rank's slice straight from its peers' memory, and write the result into theirs."""
        rank, num_ranks = self._exchange.rank, self._exchange.num_ranks
        start, stop = slice_of(rank, num_ranks, self._numel, self._dtype)
        for first, last in pieces(stop - start, _CHUNK_BYTES // self._dtype.itemsize):
            if first == last:
                continue
            operands = [tensor[start + first : start + last] for tensor in tensors]
            out = operands[rank]
            self._reduction.into(out, operands, [scratch[: last - first] for scratch in self._scratch])
            for peer, operand in enumerate(operands):
                if peer != rank:
                    operand.copy_(out)

    def _through_stages(self, sequence: int, flat: torch.Tensor) -> Progress:
        """In round i: drain chunk i - 2, reduce this rank's slice of chunk i - 1, fill in chunk i.

        A rank shows the slices that its peers reduce; where its own slice would be, it shows the result.
        """
        exchange = self._exchange
        chunks = list(pieces(self._numel, exchange.stage_bytes // self._dtype.itemsize))
        stages: list[int] = []
        for index in range(len(chunks) + 2):
            if index >= 2:
                self._drain(flat, chunks[index - 2], stages[index - 2])
            if 1 <= index <= len(chunks):
                self._reduce_slice(flat, chunks[index - 1], stages[index - 1])
            if index < len(chunks):
                stages.append(exchange.next_stage())
                self._fill(flat, chunks[index], stages[index])
            if index <= len(chunks):
                exchange.post(sequence, index + 2)
                yield from exchange.wait(sequence, index + 2)

    def _fill(self, flat: torch.Tensor, chunk: tuple[int, int], stage: int) -> None:
        for peer, (start, stop) in self._slices(chunk):
            if peer != self._exchange.rank:
                self._shown(self._exchange.rank, stage, start, stop).copy_(
                    flat[chunk[0] + start : chunk[0] + stop]
                )

    def _reduce_slice(self, flat: torch.Tensor, chunk: tuple[int, int], stage: int) -> None:
        rank = self._exchange.rank
        start, stop = dict(self._slices(chunk)).get(rank, (0, 0))
        if start == stop:
            return
        own = flat[chunk[0] + start : chunk[0] + stop]
        operands = [
            own if peer == rank else self._shown(peer, stage, start, stop)
            for peer in range(self._exchange.num_ranks)
        ]
        self._reduction.into(own, operands, [scratch[: stop - start] for scratch in self._scratch])
        self._shown(rank, stage, start, stop).copy_(own)

    def _drain(self, flat: torch.Tensor, chunk: tuple[int, int], stage: int) -> None:
        for peer, (start, stop) in self._slices(chunk):
            if peer != self._exchange.rank:
                flat[chunk[0] + start : chunk[0] + stop].copy_(self._shown(peer, stage, start, stop))

    def _slices(self, chunk: tuple[int, int]) -> list[tuple[int, tuple[int, int]]]:
        """(rank, its slice of the chunk, counted from the chunk's start), without the empty ones."""
        num_ranks = self._exchange.num_ranks
        slices = [
            (rank, slice_of(rank, num_ranks, chunk[1] - chunk[0], self._dtype)) for rank in range(num_ranks)
        ]
        return [(rank, cut) for rank, cut in slices if cut[0] < cut[1]]

    def _shown(self, rank: int, stage: int, start: int, stop: int) -> torch.Tensor:
        return self._exchange.stage(rank, stage, self._dtype, start * self._dtype.itemsize, stop - start)


def slice_of(rank: int, num_ranks: int, numel: int, dtype: torch.dtype) -> tuple[int, int]:
    """The elements that `rank` reduces: equal shares in whole cache lines, the last ones shorter or empty."""
    line = max(1, CACHE_LINE // dtype.itemsize)
    share = -(-numel // (num_ranks * line)) * line
    return min(rank * share, numel), min((rank + 1) * share, numel)
