"""All-reduce: through stages, whole or in slices, or in place where the tensors lie in shared memory.

Every way sums along the tree. Elements are independent of each other, and each is summed once, or by
everybody in the same order: all ranks hold equal bits.
"""

from __future__ import annotations

import torch

from samestep.shm.exchange import Exchange, Label, copy_bytes, pieces
from samestep.shm.heap import NOT_SHARED, Heap
from samestep.shm.operation import Progress
from samestep.shm.reduce import Reduction
from samestep.shm.region import CACHE_LINE

__all__ = ["AllReduce"]

_CHUNK_BYTES = 256 * 1024
# Up to here it costs less to let every rank reduce everything than to wait for each other once more. Two
# ranks move as many bytes either way, and reduce everything whatever the size.
_WHOLE_BYTES = 64 * 1024


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
        self.label = label
        self.premultiplies = reduction.name == "PREMUL_SUM"
        self._exchange = exchange
        self._heap = heap
        self._reduction = reduction
        self._dtype = dtype
        self._shape = shape
        self._numel = shape.numel()
        self._num_bytes = self._numel * dtype.itemsize
        few_ranks = exchange.num_ranks <= 2
        chunk_bytes = min(_CHUNK_BYTES if few_ranks else exchange.stage_bytes, exchange.stage_bytes)
        self._chunks = list(pieces(self._numel, chunk_bytes // dtype.itemsize))
        self._whole = few_ranks or self._num_bytes <= _WHOLE_BYTES
        self.is_small = self._whole and len(self._chunks) == 1
        longest = min(self._numel, chunk_bytes // dtype.itemsize)
        self._scratch = exchange.scratch(reduction.num_scratch, dtype, longest)
        self._shaped: dict[int, tuple[torch.Tensor, ...]] = {}
        self._shaped_scratch = [s.view(shape) for s in self._scratch] if self.is_small else []

    def progress(self, sequence: int, tensor: torch.Tensor) -> Progress:
        """Collective number `sequence`: `tensor`, plain, becomes the reduction over all ranks."""
        if self.is_small:
            return self._small(sequence, tensor)
        return self._large(sequence, tensor.view(-1))

    def show(self, sequence: int, tensor: torch.Tensor) -> int:
        """Show a small tensor to the peers, whole; the stage that was used. The slot must be free."""
        exchange = self._exchange
        stage = exchange.next_stage()
        copy_bytes(exchange.stage_addresses[stage], tensor.data_ptr(), self._num_bytes)
        exchange.describe(sequence, self.label)
        exchange.post(sequence, 1)
        return stage

    def take(self, sequence: int, tensor: torch.Tensor, stage: int) -> None:
        """Reduce what all ranks have shown in `stage`, and be done."""
        exchange = self._exchange
        exchange.check(sequence, self.label)
        operands = self._shaped.get(stage)
        if operands is None:
            operands = self._shaped[stage] = tuple(
                exchange.stage(rank, stage, self._dtype, 0, self._numel).view(self._shape)
                for rank in range(exchange.num_ranks)
            )
        self._reduction.into(tensor, operands, self._shaped_scratch)
        exchange.finish(sequence)

    def rest(self, sequence: int, tensor: torch.Tensor, stage: int) -> Progress:
        """What remains after `show`."""
        yield from self._exchange.wait(sequence, 1)
        self.take(sequence, tensor, stage)

    def _small(self, sequence: int, tensor: torch.Tensor) -> Progress:
        yield from self._exchange.turn(sequence)
        yield from self._exchange.slot_free(sequence)
        yield from self.rest(sequence, tensor, self.show(sequence, tensor))

    def _large(self, sequence: int, flat: torch.Tensor) -> Progress:
        """See where everyone's tensor lies, then choose the way; all choose the same.

        A rank whose tensor is private shows its first chunk at once. One whose tensor lies in shared memory
        does so only when it has seen that some other one's does not: then all wait once more.
        """
        exchange = self._exchange
        place = self._heap.place(flat)
        is_private = place is NOT_SHARED
        stages: list[int] = []
        if is_private:
            yield from exchange.turn(sequence)
        yield from exchange.slot_free(sequence)
        exchange.describe(sequence, self.label, place=place)
        if is_private:
            self._fill(flat, 0, stages)
        exchange.post(sequence, 1)
        yield from exchange.wait(sequence, 1)
        exchange.check(sequence, self.label)
        places, num_private = exchange.places(sequence)
        if num_private == 0:
            exchange.pass_turn(sequence)
            self._in_place((yield from exchange.shared(sequence, places, flat)))
            exchange.post(sequence, 2)
            yield from exchange.wait(sequence, 2)
        else:
            step = 1
            if num_private < exchange.num_ranks:
                step = 2
                yield from exchange.turn(sequence)
                if not is_private:
                    self._fill(flat, 0, stages)
                exchange.post(sequence, step)
                yield from exchange.wait(sequence, step)
            yield from (self._in_whole if self._whole else self._in_slices)(sequence, step, flat, stages)
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
            self._reduction.into(out, operands, self._cut_scratch(last - first))
            for peer, operand in enumerate(operands):
                if peer != rank:
                    operand.copy_(out)

    def _in_whole(self, sequence: int, step: int, flat: torch.Tensor, stages: list[int]) -> Progress:
        """Everybody shows every chunk and reduces it; chunk 0 has been seen, as `step`."""
        exchange = self._exchange
        for index, (start, stop) in enumerate(self._chunks):
            if index > 0:
                yield from exchange.wait(sequence, step + index)
            if index + 1 < len(self._chunks):
                self._fill(flat, index + 1, stages)
                exchange.post(sequence, step + index + 1)
            own = flat[start:stop]
            operands = [
                own if rank == exchange.rank else self._shown(rank, stages[index], 0, stop - start)
                for rank in range(exchange.num_ranks)
            ]
            self._reduction.into(own, operands, self._cut_scratch(stop - start))

    def _in_slices(self, sequence: int, step: int, flat: torch.Tensor, stages: list[int]) -> Progress:
        """In round i: drain chunk i - 2, reduce this rank's slice of chunk i - 1, fill in chunk i.

        A rank shows the slices that its peers reduce; where its own slice would be, it shows the result.
        Chunk 0 has been seen, as `step`.
        """
        exchange = self._exchange
        num_chunks = len(self._chunks)
        for index in range(1, num_chunks + 2):
            if index >= 2:
                self._drain(flat, index - 2, stages[index - 2])
            if index <= num_chunks:
                self._reduce_slice(flat, index - 1, stages[index - 1])
                if index < num_chunks:
                    self._fill(flat, index, stages)
                exchange.post(sequence, step + index)
                yield from exchange.wait(sequence, step + index)

    def _fill(self, flat: torch.Tensor, index: int, stages: list[int]) -> None:
        """Show chunk `index` in the next stage: whole, or what the peers reduce of it."""
        stage = self._exchange.next_stage()
        stages.append(stage)
        first, last = self._chunks[index]
        itemsize = self._dtype.itemsize
        target, source = self._exchange.stage_addresses[stage], flat.data_ptr() + first * itemsize
        if self._whole:
            copy_bytes(target, source, (last - first) * itemsize)
            return
        own_start, own_stop = self._slice(self._exchange.rank, index)
        copy_bytes(target, source, own_start * itemsize)
        skip = own_stop * itemsize
        copy_bytes(target + skip, source + skip, (last - first) * itemsize - skip)

    def _reduce_slice(self, flat: torch.Tensor, index: int, stage: int) -> None:
        rank = self._exchange.rank
        start, stop = self._slice(rank, index)
        if start == stop:
            return
        first = self._chunks[index][0]
        own = flat[first + start : first + stop]
        operands = [
            own if peer == rank else self._shown(peer, stage, start, stop)
            for peer in range(self._exchange.num_ranks)
        ]
        self._reduction.into(own, operands, self._cut_scratch(stop - start))
        self._shown(rank, stage, start, stop).copy_(own)

    def _drain(self, flat: torch.Tensor, index: int, stage: int) -> None:
        first = self._chunks[index][0]
        for peer in range(self._exchange.num_ranks):
            start, stop = self._slice(peer, index)
            if peer != self._exchange.rank and start < stop:
                flat[first + start : first + stop].copy_(self._shown(peer, stage, start, stop))

    def _slice(self, rank: int, index: int) -> tuple[int, int]:
        """The elements of chunk `index` that `rank` reduces, counted from the chunk's start."""
        first, last = self._chunks[index]
        return slice_of(rank, self._exchange.num_ranks, last - first, self._dtype)

    def _shown(self, rank: int, stage: int, start: int, stop: int) -> torch.Tensor:
        return self._exchange.stage(rank, stage, self._dtype, start * self._dtype.itemsize, stop - start)

    def _cut_scratch(self, numel: int) -> list[torch.Tensor]:
        return [scratch[:numel] for scratch in self._scratch]


def slice_of(rank: int, num_ranks: int, numel: int, dtype: torch.dtype) -> tuple[int, int]:
    """The elements that `rank` reduces: equal shares in whole cache lines, the last ones shorter or empty."""
    line = max(1, CACHE_LINE // dtype.itemsize)
    share = -(-numel // (num_ranks * line)) * line
    return min(rank * share, numel), min((rank + 1) * share, numel)
