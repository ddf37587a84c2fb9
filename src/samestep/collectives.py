"""The only caller of collectives. A group is any `torch.distributed.ProcessGroup`; we ask it, not the world.

The methods of the group itself are called, not the functions of `torch.distributed`: those look a group
up in module-level tables, which groups of thread ranks (tests) and of re-formed worlds are not in.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from samestep.tree import tree_sum

__all__ = [
    "Work",
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "device_of",
    "empty_for_reduction",
    "exchange_json",
    "gather",
    "gather_bytes",
    "gather_slices",
    "reduce_slices",
    "sums_along_the_tree",
    "wire_device",
]

Work = dist.Work


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device on which `group` communicates small messages: CPU if it can, else its accelerator."""
    devices = group._device_types
    cpu = torch.device("cpu")
    if cpu in devices or not devices:
        return cpu
    kind = devices[0].type
    return torch.device(kind, torch.accelerator.current_device_index())


def wire_device(device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """Where `group` communicates tensors that are on `device`: there if it can, else where it can."""
    kinds = {supported.type for supported in group._device_types}
    return device if device.type in kinds else device_of(group)


def all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    op: Any = dist.ReduceOp.SUM,
) -> Work:
    """`tensor` becomes the reduction over all ranks, once the returned work is waited for.

    Ranks: all, with equal shape and dtype, in the same order as their other collectives.
    """
    options = dist.AllreduceOptions()
    options.reduceOp = op
    options.asyncOp = True
    return group.allreduce([tensor], options)


def empty_for_reduction(
    numel: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> torch.Tensor:
    """A flat tensor, unset, that `group` reduces without copying it where it has such memory ("shm").

    Memory: this rank's alone to write, and not while a collective on it is under way.
    """
    share = getattr(group, "empty_shared", None)
    if share is None or device.type != "cpu" or not numel:
        return torch.empty(numel, dtype=dtype, device=device)
    shared: torch.Tensor = share(numel, dtype)
    return shared


class Works:
    """Several works as one, and what is to be done when they are done."""

    def __init__(self, works: Sequence[Any], then: Callable[[], object] | None = None) -> None:
        self._works = works
        self._then = then

    def wait(self) -> None:
        """Return when all are done."""
        for work in self._works:
            work.wait()
        self._works = ()
        if self._then is not None:
            self._then()
            self._then = None


def reduce_slices(flat: torch.Tensor, cuts: Sequence[int], group: dist.ProcessGroup) -> Any:
    """This rank's slice of `flat` becomes the sum of all ranks' slices there, once the work is waited for.

    On CPUs it is summed along the tree (tree.py).

    Ranks: all, with equal shape, dtype and cuts; rank r's slice is from `cuts[r]` to `cuts[r + 1]`.
    Memory: the rest of `flat` is undefined afterwards. Over "shm", `flat` must be of `empty_for_reduction`.
    """
    in_place = getattr(group, "reduce_slices", None)
    if in_place is not None:
        return in_place(flat, list(cuts))
    sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
    rank = group.rank()
    own = flat[cuts[rank] : cuts[rank + 1]]
    if flat.device.type != "cpu":
        return group.reduce_scatter([own], [list(flat.split(sizes))])
    shown = flat.new_empty(sizes[rank] * len(sizes))
    work = all_to_all_single(shown, flat, [sizes[rank]] * len(sizes), sizes, group)
    if not own.numel():
        return work

    def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left.add_(right)

    return Works([work], lambda: own.copy_(tree_sum(shown.split(sizes[rank]), add)))


def gather_slices(flat: torch.Tensor, cuts: Sequence[int], group: dist.ProcessGroup) -> Any:
    """Each rank's slice of `flat` becomes that rank's, in place, once the returned work is waited for.

    Ranks: all, with equal shape, dtype and cuts. Over "shm", `flat` must be of `empty_for_reduction`.
    """
    in_place = getattr(group, "gather_slices", None)
    if in_place is not None:
        return in_place(flat, list(cuts))
    slices = [(rank, flat[start:stop]) for rank, (start, stop) in enumerate(itertools.pairwise(cuts))]
    return Works([broadcast(part, group, src=rank) for rank, part in slices if part.numel()])


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The `tensor` of every rank, in rank order, on every rank.

    Ranks: all, with equal shape and dtype.
    """
    rows = [torch.empty_like(tensor) for _ in range(group.size())]
    group.allgather([rows], [tensor.contiguous()]).wait()
    return rows


def gather(tensor: torch.Tensor, group: dist.ProcessGroup, *, dst: int = 0) -> list[torch.Tensor] | None:
    """The `tensor` of every rank, in rank order, on rank `dst`; None on the others.

    Ranks: all, with equal shape and dtype; `dst` is a rank in `group`.
    """
    receives = group.rank() == dst
    rows = [torch.empty_like(tensor) for _ in range(group.size())] if receives else []
    options = dist.GatherOptions()
    options.rootRank = dst
    group.gather([rows] if receives else [], [tensor.contiguous()], options).wait()
    return rows if receives else None


def all_gather_single(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> Work:
    """The flat `output` becomes all ranks' `tensor`, one after the other, once the work is waited for.

    Ranks: all, with equal shape and dtype.
    Memory: `tensor` is no part of `output`.
    """
    options = AllgatherOptions()
    options.asyncOp = True
    return group._allgather_base(output, tensor, options)


def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_sizes: list[int],
    input_sizes: list[int],
    group: dist.ProcessGroup,
) -> Work:
    """The flat `output` becomes what each rank sends to this one, once the work is waited for.

    Ranks: all, with equal dtype; `input_sizes[s]` elements of `tensor` go to rank s, which has that number
    as its `output_sizes` of this rank.
    """
    options = dist.AllToAllOptions()
    options.asyncOp = True
    return group.alltoall_base(output, tensor, output_sizes, input_sizes, options)


def sums_along_the_tree(group: dist.ProcessGroup) -> bool:
    """Whether the group's own all-reduce adds the ranks' tensors along the tree (tree.py)."""
    return bool(getattr(group, "sums_along_the_tree", False))


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, *, src: int = 0) -> Work:
    """`tensor` becomes rank `src`'s, once the returned work is waited for.

    Ranks: all, with equal shape and dtype; `src` is a rank in `group`.
    """
    options = dist.BroadcastOptions()
    options.rootRank = src
    options.rootTensor = 0
    options.asyncOp = True
    return group.broadcast([tensor], options)


def barrier(group: dist.ProcessGroup, *, timeout: timedelta | None = None) -> None:
    """Return when every rank of `group` has called it.

    Ranks: all.
    """
    options = dist.BarrierOptions()
    if timeout is not None:
        options.timeout = timeout
    group.barrier(options).wait()


def gather_bytes(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """The `data` of every rank, in rank order, on every rank; lengths may differ.

    Ranks: all.
    """
    device = device_of(group)
    size = group.size()
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    lengths[group.rank()] = len(data)
    all_reduce(lengths, group).wait()
    counts = [int(n) for n in lengths.tolist()]
    longest = max(counts)
    if longest == 0:
        return [b""] * size
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
    rows = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(size)]
    group.allgather([rows], [mine.to(device)]).wait()
    return [bytes(row[:n].cpu().numpy()) for row, n in zip(rows, counts, strict=True)]


def exchange_json(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The `value` (anything JSON can hold) of every rank, in rank order, on every rank.

    JSON and not pickle: what a rank receives is data, never code.

    Ranks: all.
    """
    texts = gather_bytes(json.dumps(value).encode(), group)
    return [json.loads(text) for text in texts]
