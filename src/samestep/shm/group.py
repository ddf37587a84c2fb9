"""The process group "shm": the collectives of `torch.distributed` for the ranks of one host."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from samestep.errors import CollectiveError
from samestep.shm.allreduce import AllReduce
from samestep.shm.engine import Engine, Operation, Progress
from samestep.shm.exchange import Exchange, Label
from samestep.shm.heap import Heap
from samestep.shm.reduce import premultiplier, reduction
from samestep.shm.region import Region
from samestep.shm.signal import Signals
from samestep.shm.works import ShmWork

__all__ = ["ShmProcessGroup"]

_GRACE_S = 0.002
_MAX_PLANS = 1024


class ShmProcessGroup(dist.ProcessGroup):
    """A process group whose ranks are processes (or threads) of one host and talk through shared memory.

    Ranks: all of the group construct it over the same store.

    Args:
        store: through which the ranks find each other; used here only.
        rank: this one.
        size: number of ranks.
        timeout: how long a collective may wait for other ranks.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._timeout_s = timeout.total_seconds()
        self._region = Region(store, rank, size, timeout)
        self._signals = Signals(self._region)
        self._heap = Heap(self._region)
        self._exchange = Exchange(self._region, self._signals, self._heap)
        self._engine = Engine(self._region, self._signals, self._exchange.doing, grace_s=_GRACE_S)
        self._sequence = 0
        self._plans: dict[Any, Any] = {}

    # What torch asks a group.

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """The name it is registered by."""
        return "shm"

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def set_timeout(self, timeout: timedelta) -> None:
        """Collectives issued from now on may wait that long for other ranks."""
        self._timeout_s = timeout.total_seconds()

    def abort(self) -> None:
        """End all collectives in flight with an error, here and on all ranks; the group is of no more use.

        Ranks: any, alone, from any thread.
        """
        self._engine.abort(f"rank {self._rank} (process {self._region.pids[self._rank]}) aborted the group")
        self._engine.close()
        self._region.close()
        self._heap.close()

    def shutdown(self) -> None:
        """This rank leaves the group: peers that still wait for it get an error.

        Ranks: all, after their last collective.
        """
        if self._signals.state(self._rank) == Signals.ALIVE:
            self._signals.leave(Signals.LEFT)
        self._engine.close()
        self._region.close()
        self._heap.close()

    def empty_shared(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor that the group's ranks share: `allreduce` of it copies nothing in or out.

        For that all ranks must pass such tensors, or contiguous views of them, of equal size.

        Ranks: any, alone.

        Memory: it belongs to this rank, which alone should write it outside of collectives. It lives as long
        as a tensor refers to it, even beyond the group; then its memory serves the next `empty_shared`,
        until the group is destroyed.

        Raises:
            CollectiveError: there is not enough memory.
        """
        try:
            return self._heap.empty(numel, dtype)
        except OSError as error:
            raise CollectiveError(
                f"rank {self._rank} could not reserve {numel * dtype.itemsize} bytes of shared memory: "
                f"{error.strerror}"
            ) from error

    # The collectives.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> ShmWork:
        """The tensor becomes the reduction of all ranks' tensors, along the tree.

        Ranks: all, with equal shape, dtype and operation.
        """
        opts = opts or dist.AllreduceOptions()
        (tensor,) = tensors
        if tensor.requires_grad:
            tensor = tensor.detach()
        op = opts.reduceOp
        key = (tensor.shape, tensor.dtype, hash(op))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan_all_reduce(tensor, op)
            self._keep_plan(key, plan)
        factor = premultiplier(op) if plan.label.text.startswith("all_reduce(PREMUL") else None
        if factor is not None:
            tensor.mul_(factor)
        if self._size == 1:
            return ShmWork(self._engine, None, tensors)
        if tensor.is_contiguous():
            return self._launch(plan.label, plan.progress, tensor, tensors, opts)
        return self._launch(
            plan.label,
            lambda sequence, strided: self._on_copy(plan, sequence, strided),
            tensor,
            tensors,
            opts,
        )

    def _on_copy(self, plan: AllReduce, sequence: int, strided: torch.Tensor) -> Progress:
        dense = strided.contiguous()
        yield from plan.progress(sequence, dense)
        strided.copy_(dense)

    def _plan_all_reduce(self, tensor: torch.Tensor, op: Any) -> AllReduce:
        name = op_name(op)
        label = Label.of(f"all_reduce({name}) of {describe(tensor)}")
        reducing = reduction(name, tensor.dtype, self._size)
        return AllReduce(self._exchange, self._heap, label, reducing, tensor.shape, tensor.dtype)

    def _launch(
        self,
        label: Label,
        progress: Callable[[int, torch.Tensor], Progress],
        tensor: torch.Tensor,
        results: list[torch.Tensor],
        opts: Any,
    ) -> ShmWork:
        sequence = self._sequence = self._sequence + 1
        self._exchange.join(sequence)
        operation = Operation(
            f"collective number {sequence}, {label.text},",
            progress(sequence, tensor),
            time.monotonic() + self._timeout_s,
        )
        if opts.asyncOp:
            self._engine.start(operation)
        else:
            self._engine.run(operation)
        return ShmWork(self._engine, operation, results)

    def _keep_plan(self, key: Any, plan: Any) -> None:
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan


def op_name(op: Any) -> str:
    """The name of a reduce operation, "SUM" for example."""
    kind = getattr(op, "op", op)
    return str(kind).rpartition(".")[2]


def describe(tensor: torch.Tensor) -> str:
    """Dtype and shape, "float32[3, 4]" for example."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _refuse(name: str) -> Callable[..., ShmWork]:
    def refuse(self: ShmProcessGroup, *_: Any, **__: Any) -> ShmWork:
        raise CollectiveError(f'backend="shm" has no {name} yet: use backend="gloo"')

    refuse.__name__ = name
    refuse.__doc__ = f"Refused: there is no {name} yet."
    return refuse


for _name in (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
):
    setattr(ShmProcessGroup, _name, _refuse(_name))
