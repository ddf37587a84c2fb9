"""What torch's collectives are called with -> what is compared between ranks, and the rounds that do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from samestep.errors import CollectiveError
from samestep.shm.allreduce import AllReduce
from samestep.shm.exchange import Exchange, Label, label_of
from samestep.shm.heap import Heap
from samestep.shm.moving import barrier, deal, reduce_scatter, share
from samestep.shm.operation import Progress
from samestep.shm.reduce import op_name, premultiplier, reduction
from samestep.shm.slices import gather_slices, reduce_slices
from samestep.shm.tensors import (
    Back,
    copying_back,
    dense,
    densely,
    describe,
    dtype_name,
    is_plain,
    readable,
    writable,
)

__all__ = ["Call", "Calls"]

_MAX_PLANS = 1024
_NOTHING = torch.empty(0, dtype=torch.uint8)
Tensors = Sequence[torch.Tensor]


class Call(NamedTuple):
    """A collective that can be issued."""

    label: Label  # what must agree between ranks
    start: Callable[[int], Progress]  # sequence number -> the collective


class Calls:
    """Makes the calls of one rank of one group.

    Every method raises CollectiveError for arguments that make no sense on this rank alone.
    """

    def __init__(self, exchange: Exchange, heap: Heap) -> None:
        self._exchange = exchange
        self._heap = heap
        self._rank = exchange.rank
        self._size = exchange.num_ranks
        self._plans: dict[Any, AllReduce] = {}

    def reduce(self, kind: str, tensor: torch.Tensor, op: Any) -> Call:
        """`tensor` becomes the reduction; `kind` is the name of the collective."""
        plan = self.plan(kind, tensor, op)
        if tensor.requires_grad:
            tensor = tensor.detach()
        if plan.premultiplies:
            tensor.mul_(premultiplier(op))
        if is_plain(tensor):
            return Call(plan.label, lambda sequence: plan.progress(sequence, tensor))
        standing = dense(tensor)
        return Call(
            plan.label,
            lambda sequence: copying_back(plan.progress(sequence, standing), [(tensor, standing)]),
        )

    def plan(self, kind: str, tensor: torch.Tensor, op: Any) -> AllReduce:
        """How to reduce tensors like this one."""
        key = (kind, tensor.shape, tensor.dtype, hash(op))
        plan = self._plans.get(key)
        if plan is None:
            dense(tensor)  # refuses what is not
            name = op_name(op)
            label = label_of(f"{kind}({name}) of {describe(tensor)}")
            reducing = reduction(name, tensor.dtype, self._size)
            plan = AllReduce(self._exchange, self._heap, label, reducing, tensor.shape, tensor.dtype)
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def broadcast(self, tensor: torch.Tensor, root: int) -> Call:
        """`tensor` becomes the root's."""
        label = label_of(f"broadcast(src={root}) of {dtype_name(tensor)}[{tensor.numel()}]")
        back: Back = []
        outs: list[torch.Tensor | None] = [None] * self._size
        if self._rank == root:
            return self._moving(share, label, readable(tensor), outs, back)
        outs[root] = writable(tensor, back)
        return self._moving(share, label, None, outs, back)

    def all_gather(self, outputs: Tensors, tensor: torch.Tensor, back: Back | None = None) -> Call:
        """`outputs[r]` becomes rank r's `tensor`."""
        back = [] if back is None else back
        self._check_list("all_gather", outputs, tensor)
        label = label_of(f"all_gather of {dtype_name(tensor)}, {_sizes(outputs)}")
        outs = [writable(output, back) for output in outputs]
        return self._moving(share, label, readable(tensor), outs, back)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> Call:
        """`output` becomes all ranks' `tensor`s, one after the other."""
        back: Back = []
        parts = self._even_parts("all_gather_single", densely(output, back), tensor.numel())
        return self.all_gather(parts, tensor, back)

    def gather(self, outputs: Tensors, tensor: torch.Tensor, root: int) -> Call:
        """The root's `outputs[r]` becomes rank r's `tensor`."""
        back: Back = []
        outs: list[torch.Tensor | None] = [None] * self._size
        if self._rank == root:
            self._check_list("gather", outputs, tensor)
            outs = [writable(output, back) for output in outputs]
        label = label_of(f"gather(dst={root}) of {dtype_name(tensor)}")
        return self._moving(share, label, readable(tensor), outs, back)

    def scatter(self, output: torch.Tensor, inputs: Tensors, root: int) -> Call:
        """`output` becomes what the root has for this rank."""
        parts = [_NOTHING] * self._size
        if self._rank == root:
            self._check_list("scatter", inputs, output)
            parts = [readable(tensor) for tensor in inputs]
        back: Back = []
        outs = [_NOTHING] * self._size
        outs[root] = writable(output, back)
        return self._moving(deal, label_of(f"scatter(src={root}) of {dtype_name(output)}"), parts, outs, back)

    def all_to_all(self, outputs: Tensors, inputs: Tensors, back: Back | None = None) -> Call:
        """`outputs[r]` becomes what rank r has for this rank."""
        back = [] if back is None else back
        like = (*outputs, *inputs)[0]
        self._check_list("all_to_all", outputs, like)
        self._check_list("all_to_all", inputs, like)
        outs = [writable(output, back) for output in outputs]
        parts = [readable(tensor) for tensor in inputs]
        return self._moving(deal, label_of(f"all_to_all of {dtype_name(like)}"), parts, outs, back)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        splits: Sequence[int],
    ) -> Call:
        """As `all_to_all`, of rows of one tensor; no splits mean equal ones."""
        back: Back = []
        outputs = self._rows(densely(output, back), output, output_splits)
        return self.all_to_all(outputs, self._rows(dense(tensor).view(-1), tensor, splits), back)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Tensors, op: Any, back: Back | None = None
    ) -> Call:
        """`output` becomes the reduction of what all ranks have for this rank."""
        back = [] if back is None else back
        self._check_list("reduce_scatter", inputs, output)
        name = op_name(op)
        label = label_of(f"reduce_scatter({name}) of {dtype_name(output)}, {_sizes(inputs)}")
        reducing = reduction(name, output.dtype, self._size)
        factor = premultiplier(op)
        parts = [dense(t if factor is None else t * factor).view(-1) for t in inputs]
        flat = densely(output, back)

        def start(sequence: int) -> Progress:
            progress = reduce_scatter(self._exchange, sequence, label, parts, flat, reducing)
            return copying_back(progress, back)

        return Call(label, start)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, op: Any) -> Call:
        """As `reduce_scatter`, of equal parts of one tensor."""
        parts = self._even_parts("reduce_scatter_single", dense(tensor).view(-1), output.numel())
        return self.reduce_scatter(output, parts, op)

    def reduce_slices(self, flat: torch.Tensor, cuts: Sequence[int], op: Any) -> Call:
        """This rank's slice of `flat`, in shared memory, becomes the reduction of all ranks' slices there."""
        name = op_name(op)
        label = label_of(f"reduce_slices({name}) of {describe(flat)}, cut at {list(cuts)}")
        reducing = reduction(name, flat.dtype, self._size)

        def start(sequence: int) -> Progress:
            return reduce_slices(self._exchange, self._heap, sequence, label, flat, cuts, reducing)

        return Call(label, start)

    def gather_slices(self, flat: torch.Tensor, cuts: Sequence[int]) -> Call:
        """Each rank's slice of `flat`, in shared memory, becomes that rank's."""
        label = label_of(f"gather_slices of {describe(flat)}, cut at {list(cuts)}")
        return Call(
            label, lambda sequence: gather_slices(self._exchange, self._heap, sequence, label, flat, cuts)
        )

    def barrier(self, kind: str) -> Call:
        """All ranks have joined."""
        label = label_of(kind)
        return Call(label, lambda sequence: barrier(self._exchange, sequence, label))

    def _moving(
        self, pattern: Callable[..., Progress], label: Label, shown: Any, outs: Any, back: Back
    ) -> Call:
        def start(sequence: int) -> Progress:
            return copying_back(pattern(self._exchange, sequence, label, shown, outs), back)

        return Call(label, start)

    def _even_parts(self, kind: str, flat: torch.Tensor, numel: int) -> list[torch.Tensor]:
        if flat.numel() != numel * self._size:
            raise CollectiveError(
                f"{kind}: {flat.numel()} elements are not {self._size} times {numel}: the larger tensor "
                "holds one part per rank"
            )
        return [flat[rank * numel : (rank + 1) * numel] for rank in range(self._size)]

    def _rows(self, flat: torch.Tensor, tensor: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
        """The parts of `tensor`, of which `flat` holds the elements, one per rank."""
        num_rows = tensor.shape[0] if tensor.dim() else 0
        if not splits:
            if num_rows % self._size:
                raise CollectiveError(
                    f"all_to_all_single: {num_rows} rows cannot be split evenly among {self._size} ranks: "
                    "give the split sizes"
                )
            splits = [num_rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != num_rows:
            raise CollectiveError(
                f"all_to_all_single: the split sizes {list(splits)} must be {self._size} numbers that add up "
                f"to the {num_rows} rows of the tensor"
            )
        row = tensor[0].numel() if num_rows else 1
        return list(torch.split(flat, [rows * row for rows in splits]))

    def _check_list(self, kind: str, tensors: Tensors, like: torch.Tensor) -> None:
        if len(tensors) != self._size or any(tensor.dtype != like.dtype for tensor in tensors):
            raise CollectiveError(
                f"{kind}: a list of {self._size} tensors of {like.dtype} is needed, one per rank; given were "
                f"{[describe(tensor) for tensor in tensors]}"
            )


def _sizes(tensors: Tensors) -> str:
    sizes = [tensor.numel() for tensor in tensors]
    return f"{sizes[0]} elements each" if len(set(sizes)) == 1 else f"{sizes} elements"
