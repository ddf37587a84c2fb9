"""The process group "shm": the collectives of `torch.distributed` for the ranks of one host."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import Store

from samestep.errors import CollectiveError
from samestep.shm.calls import Call, Calls
from samestep.shm.engine import Engine
from samestep.shm.exchange import Exchange
from samestep.shm.heap import Heap
from samestep.shm.issue import Issuer
from samestep.shm.lanes import Lanes, Receipt
from samestep.shm.operation import Progress
from samestep.shm.region import Region
from samestep.shm.signal import Signals
from samestep.shm.tensors import Back, copying_back, describe, is_plain, readable, writable
from samestep.shm.works import ShmWork

__all__ = ["ShmProcessGroup"]

_GRACE_S = 0.02  # see docs/decisions: progress is made by whoever issues and waits


# torch's stubs give every method several forms; torch itself calls the ones below.
_ProcessGroup: Any = dist.ProcessGroup


class ShmProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose ranks are processes (or threads) of one host and talk through shared memory.

    Ranks: all of the group construct it over the same store.

    Args:
        store: through which the ranks find each other; used here only.
        rank: this one.
        size: number of ranks.
        timeout: how long a collective may wait for other ranks.
    """

    sums_along_the_tree = True

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._region = Region(store, rank, size, timeout)
        self._signals = Signals(self._region)
        self._heap = Heap(self._region)
        self._exchange = Exchange(self._region, self._signals, self._heap)
        self._lanes = Lanes(self._region, self._signals)
        self._engine = Engine(self._region, self._signals, self._exchange.doing, grace_s=_GRACE_S)
        self._issuer = Issuer(self._engine, self._exchange, timeout.total_seconds())
        self._calls = Calls(self._exchange, self._heap)
        self._store = store
        self._timeout = timeout
        self._name = ""
        self._desc = "undefined"

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

    def getGroupName(self) -> str:  # noqa: N802
        """The name torch gave it."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name torch gives it."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """What torch describes it as."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Take torch's description."""
        self._desc = desc

    def set_timeout(self, timeout: timedelta) -> None:
        """Collectives issued from now on may wait that long for other ranks."""
        self._timeout = timeout
        self._issuer.timeout_s = timeout.total_seconds()

    def get_group_store(self) -> Store:
        """The store through which the ranks found each other."""
        return self._store

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> ShmProcessGroup | None:
        """A group of `new_ranks`, ranks of this one, numbered in that order; None on other ranks.

        Ranks: those in `new_ranks`, with equal `new_ranks` and `group_name`.
        """
        if self._rank not in new_ranks:
            return None
        name = group_name or f"{self._name}:split:{'-'.join(map(str, new_ranks))}"
        store = dist.PrefixStore(f"{name}/", self._store)
        group = ShmProcessGroup(store, new_ranks.index(self._rank), len(new_ranks), timeout or self._timeout)
        group.setGroupName(name)
        group.setGroupDesc(group_desc or f"{self._desc}:split")
        return group

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

    def reduce_slices(self, tensor: torch.Tensor, cuts: list[int]) -> ShmWork:
        """This rank's slice of a flat tensor of `empty_shared` becomes the sum of all ranks' slices there.

        Ranks: all, with equal shape, dtype and cuts; rank r's slice is from `cuts[r]` to `cuts[r + 1]`.

        Memory: peers read the rest of the tensor until the work is done; it is left as it is.
        """
        call = self._calls.reduce_slices(tensor, cuts, dist.ReduceOp.SUM)
        return self._issuer.launch(call, [tensor], in_background=True)

    def gather_slices(self, tensor: torch.Tensor, cuts: list[int]) -> ShmWork:
        """Each rank's slice of a flat tensor of `empty_shared` becomes that rank's.

        Ranks: all, with equal shape, dtype and cuts.
        """
        return self._issuer.launch(self._calls.gather_slices(tensor, cuts), [tensor], in_background=True)

    # The collectives, under the names by which torch.distributed and its C++ side call them.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> ShmWork:
        """The tensor becomes the reduction of all ranks' tensors, along the tree.

        Ranks: all, with equal shape, dtype and operation.
        """
        opts = opts or dist.AllreduceOptions()
        (tensor,) = tensors
        op = opts.reduceOp
        if not opts.asyncOp and is_plain(tensor) and not tensor.requires_grad:
            plan = self._calls.plan("all_reduce", tensor, op)
            if plan.is_small and not plan.premultiplies:
                work = self._issuer.run_small(plan, tensor)
                if work is not None:
                    return work
        return self._launch(self._calls.reduce("all_reduce", tensor, op), tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> ShmWork:
        """Each tensor becomes the reduction of its counterparts.

        Ranks: all, with equal lists.
        """
        opts = opts or dist.AllreduceCoalescedOptions()
        calls = [self._calls.reduce("all_reduce", tensor, opts.reduceOp) for tensor in tensors]
        return self._launch_all(calls, tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> ShmWork:
        """The root's tensor becomes the reduction of all ranks' tensors; the others keep theirs.

        Ranks: all, with equal shape, dtype, operation and root.
        """
        opts = opts or dist.ReduceOptions()
        (tensor,) = tensors
        root = opts.rootRank
        target = tensor if self._rank == root else tensor.detach().clone()
        return self._launch(self._calls.reduce(f"reduce to {root}", target, opts.reduceOp), tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> ShmWork:
        """The tensor becomes the root's.

        Ranks: all, with equal number of elements, dtype and root.
        """
        opts = opts or dist.BroadcastOptions()
        (tensor,) = tensors
        return self._launch(self._calls.broadcast(tensor, opts.rootRank), tensors, opts)

    def allgather(
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any = None
    ) -> ShmWork:
        """Output r becomes rank r's input. Sizes may differ from rank to rank.

        Ranks: all, with equal dtype and equal sizes of the outputs.
        """
        (outputs,), (tensor,) = output_tensors, input_tensors
        return self._launch(
            self._calls.all_gather(outputs, tensor), output_tensors, opts or AllgatherOptions()
        )

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> ShmWork:
        """The output becomes all ranks' inputs, one after the other.

        Ranks: all, with equal shape and dtype.
        """
        call = self._calls.all_gather_single(output, input)
        return self._launch(call, output, opts or AllgatherOptions())

    def all_gather_single_coalesced(
        self, output_list: list[torch.Tensor], input_list: list[torch.Tensor], opts: Any = None
    ) -> ShmWork:
        """As `all_gather_single`, for each pair.

        Ranks: all, with equal lists.
        """
        pairs = zip(output_list, input_list, strict=True)
        calls = [self._calls.all_gather_single(output, tensor) for output, tensor in pairs]
        return self._launch_all(calls, output_list, opts or AllgatherOptions())

    def allgather_coalesced(
        self, output_lists: list[list[torch.Tensor]], input_list: list[torch.Tensor], opts: Any = None
    ) -> ShmWork:
        """As `allgather`, for each input; `output_lists[r]` holds what comes from rank r.

        Ranks: all, with equal lists.
        """
        calls = [
            self._calls.all_gather([outputs[index] for outputs in output_lists], tensor)
            for index, tensor in enumerate(input_list)
        ]
        return self._launch_all(calls, output_lists, opts or AllgatherOptions())

    def gather(
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any = None
    ) -> ShmWork:
        """Output r of the root becomes rank r's input.

        Ranks: all, with equal dtype and root.
        """
        opts = opts or dist.GatherOptions()
        (tensor,) = input_tensors
        outputs = output_tensors[0] if output_tensors else []
        return self._launch(self._calls.gather(outputs, tensor, opts.rootRank), output_tensors, opts)

    def scatter(
        self, output_tensors: list[torch.Tensor], input_tensors: list[list[torch.Tensor]], opts: Any = None
    ) -> ShmWork:
        """The output becomes the root's input for this rank.

        Ranks: all, with equal dtype and root.
        """
        opts = opts or dist.ScatterOptions()
        (output,) = output_tensors
        inputs = input_tensors[0] if input_tensors else []
        return self._launch(self._calls.scatter(output, inputs, opts.rootRank), output_tensors, opts)

    def alltoall(
        self, output_tensors: list[torch.Tensor], input_tensors: list[torch.Tensor], opts: Any = None
    ) -> ShmWork:
        """Output r becomes the input that rank r has for this rank. Sizes may differ.

        Ranks: all, with equal dtype.
        """
        call = self._calls.all_to_all(output_tensors, input_tensors)
        return self._launch(call, output_tensors, opts or dist.AllToAllOptions())

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> ShmWork:
        """As `alltoall`, of the rows of one tensor; splits are numbers of rows, none means equal ones.

        Ranks: all, with equal dtype.
        """
        call = self._calls.all_to_all_single(output, input, output_split_sizes, input_split_sizes)
        return self._launch(call, [output], opts or dist.AllToAllOptions())

    def reduce_scatter(
        self, output_tensors: list[torch.Tensor], input_tensors: list[list[torch.Tensor]], opts: Any = None
    ) -> ShmWork:
        """The output becomes the reduction, along the tree, of all ranks' inputs for this rank.

        Ranks: all, with equal dtype, operation and sizes of the inputs.
        """
        opts = opts or dist.ReduceScatterOptions()
        (output,), (inputs,) = output_tensors, input_tensors
        return self._launch(self._calls.reduce_scatter(output, inputs, opts.reduceOp), output_tensors, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> ShmWork:
        """As `reduce_scatter`, of equal parts of one tensor.

        Ranks: all, with equal shape, dtype and operation.
        """
        opts = opts or dist.ReduceScatterOptions()
        return self._launch(self._calls.reduce_scatter_single(output, input, opts.reduceOp), [output], opts)

    def reduce_scatter_single_coalesced(
        self, output_list: list[torch.Tensor], input_list: list[torch.Tensor], opts: Any = None
    ) -> ShmWork:
        """As `reduce_scatter_single`, for each pair.

        Ranks: all, with equal lists.
        """
        opts = opts or dist.ReduceScatterOptions()
        pairs = zip(output_list, input_list, strict=True)
        calls = [self._calls.reduce_scatter_single(output, tensor, opts.reduceOp) for output, tensor in pairs]
        return self._launch_all(calls, output_list, opts)

    def barrier(self, opts: Any = None) -> ShmWork:
        """Done when all ranks have joined, and what they issued before is done.

        Ranks: all.
        """
        opts = opts or dist.BarrierOptions()
        return self._launch(self._calls.barrier("barrier"), [], opts, opts.timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Return when all ranks have joined.

        Ranks: all.

        Raises:
            CollectiveError: one has not within `timeout`; which one, the message says.
        """
        self._launch(self._calls.barrier("monitored_barrier"), [], dist.BarrierOptions(), timeout).wait()

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> ShmWork:
        """Rank `dst` can receive the tensor; done when it has been copied into the lane there.

        Ranks: this one and `dst`, which must call `recv` with equal shape, dtype and tag.
        """
        (tensor,) = tensors
        payload = readable(tensor)
        return self._issuer.converse(
            f"send to rank {dst} of {describe(tensor)}",
            lambda: self._lanes.send(dst, tag, payload, tensor.dtype),
            tensors,
        )

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> ShmWork:
        """The tensor becomes what rank `src` sends with this tag.

        Ranks: this one and `src`, which must call `send` with equal shape, dtype and tag.
        """
        return self._receive(tensors, src, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> ShmWork:
        """The tensor becomes what the first rank sends with this tag; the work says which one it was.

        Ranks: this one and a sender.
        """
        return self._receive(tensors, None, tag)

    # Older names of the same.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _start_coalescing(self, device: torch.device) -> None:
        self._issuer.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> ShmWork:
        return self._issuer.end_coalescing()

    def _launch(self, call: Call, results: Any, opts: Any, timeout: timedelta | None = None) -> ShmWork:
        # torch says "the group's time-out" by a negative one.
        timeout_s = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        return self._issuer.launch(call, results, in_background=opts.asyncOp, timeout_s=timeout_s)

    def _launch_all(self, calls: list[Call], results: Any, opts: Any) -> ShmWork:
        return self._issuer.launch_all(calls, results, in_background=opts.asyncOp)

    def _receive(self, tensors: list[torch.Tensor], src: int | None, tag: int) -> ShmWork:
        (tensor,) = tensors
        back: Back = []
        receipt = Receipt(tag, tensor.dtype, writable(tensor, back))

        def start() -> Progress:
            return copying_back(self._lanes.receive(src, receipt), back)

        sender = "any rank" if src is None else f"rank {src}"
        work = self._issuer.converse(f"recv from {sender} of {describe(tensor)}", start, tensors)
        work.receipt = receipt
        return work
