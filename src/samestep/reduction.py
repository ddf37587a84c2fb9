"""Sums over the virtual ranks of a group, along the tree: the same bits whoever plays them.

[Note: How a sum travels] Each rank holds one partial sum per complete subtree of its block, its *parts*.

- All ranks' parts together follow the tree over ranks, and the group's own all-reduce sums along it ("shm"):
  that all-reduce, in place. Of two ranks any all-reduce does, since a + b is b + a.
- Small ones: every rank gets all parts and sums them itself. One message.
- Else each part is cut in W slices. Slice r of all parts goes to rank r (all-to-all), which sums them along
  the tree, and the sums go to all (all-gather). With one part per rank, which is so wherever blocks are
  complete subtrees, this moves 2 * (W - 1) / W times the size, as a ring does; a block of p parts sends p
  times as much in the first half.

[Note: Two halves] The second half of a sum is issued right after the first half of the next one, by the
thread that issues everything else: so all ranks issue all collectives in one order, and the slices of one
sum are added while those of the next travel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep import collectives
from samestep.errors import WorldError
from samestep.tree import PartialSums, Span, combine, subtrees, tree_sum
from samestep.virtual import VirtualRanks

__all__ = ["PendingSum", "TreeSum", "mean_over_virtual_ranks", "padded_numel", "tree_sum_of"]

_WHOLE_BYTES = 32 * 1024  # of all ranks' parts together; up to here one message beats less traffic
_ROUNDED_ONCE = (torch.float32, torch.float64)
_ALIGNMENT = 16  # elements; slices begin on whole cache lines


def padded_numel(numel: int, num_ranks: int) -> int:
    """The length that flat tensors of at least `numel` elements have when they are cut in equal slices."""
    return num_ranks * slice_numel(numel, num_ranks)


def slice_numel(numel: int, num_ranks: int) -> int:
    """The length of each slice of a flat tensor of `numel` elements."""
    share = -(-numel // num_ranks)
    return -(-share // _ALIGNMENT) * _ALIGNMENT


class TreeSum:
    """Sums parts over the virtual ranks of one group.

    Ranks: all make one, and start the same sums in the same order.

    Args:
        group: the processes.
        virtual: their virtual ranks.
    """

    def __init__(self, group: dist.ProcessGroup, virtual: VirtualRanks) -> None:
        self.group = group
        self.virtual_size = virtual.virtual_size
        self.nodes = subtrees(virtual.block, virtual.virtual_size)  # of this rank's parts
        self._rank, self._num_ranks = group.rank(), group.size()
        self._all_nodes = [subtrees(block, virtual.virtual_size) for block in virtual.blocks()]
        # Whether adding one part per rank along the tree over ranks is adding along that over virtual ranks.
        self.follows_ranks = _follows_ranks(self._all_nodes, virtual.virtual_size)
        self.is_all_reduce = self.follows_ranks and collectives.sums_along_the_tree(group)
        self._first_halves: list[PendingSum] = []
        self._scratch: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
        self._side_streams: dict[torch.device, Any] = {}

    def uses_all_reduce(self, dtype: torch.dtype) -> bool:
        """Whether sums of `dtype` are the group's own all-reduces."""
        # Narrow floats are left out: how often a backend rounds them on the way is its own affair.
        is_one_addition = self._num_ranks == 2 and self.follows_ranks and dtype in _ROUNDED_ONCE
        return self.is_all_reduce or is_one_addition

    def padded(self, numel: int) -> int:
        """The length of parts of `numel` elements that are sent without being copied first."""
        return numel if self.is_all_reduce or self._num_ranks == 1 else padded_numel(numel, self._num_ranks)

    def start(self, parts: Sequence[Tensor], out: Tensor) -> PendingSum:
        """`out` becomes the sum over all virtual ranks, once the result is waited for.

        Ranks: all, with equal lengths and dtypes, in the same order as their other collectives.

        Memory: `out` may be one of `parts`; all stay as they are until the sum is waited for.

        Args:
            parts: this rank's, flat, one per node of `nodes`, in order.
            out: flat, of the parts' length.
        """
        assert len(parts) == len(self.nodes), "one part per complete subtree of the block"
        pending = PendingSum(self, parts, out)
        if self._num_ranks == 1:
            _copy(parts[0], out)
        elif self.uses_all_reduce(out.dtype):
            _copy(parts[0], out)
            pending.work = collectives.all_reduce(out, self.group)
        elif out.numel() * out.element_size() * self._num_parts <= _WHOLE_BYTES:
            self._show_whole(pending)
        else:
            self._send_slices(pending)
            self._second_halves(until=pending)
            self._first_halves.append(pending)
        return pending

    def total(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        """`out`, which is the sum over all virtual ranks.

        Ranks: all, as for `start`.
        """
        self.start(parts, out).wait()
        return out

    def forget(self) -> None:
        """Sums that were started and not waited for are given up: their group has failed."""
        self._first_halves.clear()

    @property
    def _num_parts(self) -> int:
        return sum(map(len, self._all_nodes))

    # Small: everybody sums everything

    def _show_whole(self, pending: PendingSum) -> None:
        most = max(map(len, self._all_nodes))
        shape = (most, pending.out.numel())
        mine = pending.out.new_zeros(shape)
        for row, part in zip(mine, pending.parts, strict=False):
            row.copy_(part)
        pending.shown = pending.out.new_empty((self._num_ranks, *shape))
        pending.work = collectives.all_gather_single(pending.shown.view(-1), mine.view(-1), self.group)
        pending.sent = mine

    def sum_whole(self, pending: PendingSum) -> None:
        """Add up what all ranks have shown."""
        assert pending.shown is not None
        shown = {
            node: pending.shown[rank, index]
            for rank, nodes in enumerate(self._all_nodes)
            for index, node in enumerate(nodes)
        }
        pending.out.copy_(combine(shown, self.virtual_size, _add))

    # Large: each rank sums its slice

    def _send_slices(self, pending: PendingSum) -> None:
        out, num_ranks = pending.out, self._num_ranks
        share = slice_numel(out.numel(), num_ranks)
        num_own = len(self.nodes)
        if num_own == 1 and out.numel() == share * num_ranks:
            pending.sent = pending.parts[0]
        else:
            pending.sent = self._take(num_ranks * num_own * share, out)
            rows = pending.sent.view(num_ranks, num_own, share)
            for index, part in enumerate(pending.parts):
                for rank in range(num_ranks):
                    piece = part[rank * share : (rank + 1) * share]
                    rows[rank, index, : piece.numel()].copy_(piece)
            pending.borrowed.append(pending.sent)
        pending.received = self._take(self._num_parts * share, out)
        pending.borrowed.append(pending.received)
        pending.work = collectives.all_to_all_single(
            pending.received,
            pending.sent,
            [len(nodes) * share for nodes in self._all_nodes],
            [num_own * share] * num_ranks,
            self.group,
        )

    def _second_halves(self, *, until: PendingSum | None = None) -> None:
        while self._first_halves and self._first_halves[0] is not until:
            self._sum_and_share(self._first_halves.pop(0))

    def _sum_and_share(self, pending: PendingSum) -> None:
        """Add up the slice of all parts, and send the sum to all ranks."""
        out, work, received = pending.out, pending.work, pending.received
        assert work is not None
        assert received is not None
        with self._beside_compute(out.device) as stream:
            work.wait()
            rows = iter(received.view(self._num_parts, -1))
            shown = {node: next(rows) for nodes in self._all_nodes for node in nodes}
            mine = combine(shown, self.virtual_size, _add)
            whole = out
            if out.numel() != mine.numel() * self._num_ranks:
                whole = self._take(mine.numel() * self._num_ranks, out)
                pending.borrowed.append(whole)
                pending.padded_out = whole
            pending.work = collectives.all_gather_single(whole, mine, self.group)
            if stream is not None:
                for tensor in (received, whole):
                    tensor.record_stream(stream)

    def finish(self, pending: PendingSum) -> None:
        """`pending` is done, and everything that was started has its second half under way."""
        self._second_halves()
        work, pending.work = pending.work, None
        if work is not None:
            work.wait()
        if pending.shown is not None:
            self.sum_whole(pending)
        if pending.padded_out is not None:
            pending.out.copy_(pending.padded_out[: pending.out.numel()])
        for tensor in pending.borrowed:
            self._scratch.setdefault((tensor.numel(), tensor.dtype, tensor.device), []).append(tensor)
        pending.borrowed.clear()
        pending.shown = pending.sent = pending.received = pending.padded_out = None

    @contextlib.contextmanager
    def _beside_compute(self, device: torch.device) -> Any:
        """On an accelerator, a stream that waits for communication so that backward's need not."""
        if device.type == "cpu":
            yield None
            return
        stream = self._side_streams.get(device)
        if stream is None:
            stream = self._side_streams[device] = torch.Stream(device)
        with stream:
            yield stream

    def _take(self, numel: int, like: Tensor) -> Tensor:
        free = self._scratch.get((numel, like.dtype, like.device))
        return free.pop() if free else like.new_empty(numel)


class PendingSum:
    """A sum under way; `TreeSum.start` makes it."""

    def __init__(self, tree_sum: TreeSum, parts: Sequence[Tensor], out: Tensor) -> None:
        self.parts = parts
        self.out = out
        self.work: collectives.Work | None = None
        self.sent: Tensor | None = None
        self.received: Tensor | None = None
        self.shown: Tensor | None = None
        self.padded_out: Tensor | None = None
        self.borrowed: list[Tensor] = []
        self._tree_sum = tree_sum

    def wait(self) -> None:
        """Return when `out` is the sum.

        Ranks: all, in the order in which the sums were started.
        """
        self._tree_sum.finish(self)


def _add(left: Tensor, right: Tensor) -> Tensor:
    return left.add_(right)


def _copy(source: Tensor, target: Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)


def _follows_ranks(all_nodes: Sequence[Sequence[Span]], virtual_size: int) -> bool:
    """Whether each rank has one part, and the tree over them is the tree over ranks."""
    if any(len(nodes) != 1 for nodes in all_nodes):
        return False

    def bracket(left: str, right: str) -> str:
        return f"({left}+{right})"

    names = {nodes[0]: str(rank) for rank, nodes in enumerate(all_nodes)}
    return combine(names, virtual_size, bracket) == tree_sum(list(names.values()), bracket)


def tree_sum_of(values: Tensor) -> Tensor:
    """The sum of `values` over its first dimension, along the tree; all additions of a level at once."""
    while len(values) > 1:
        even = len(values) // 2 * 2
        pairs = values[0:even:2] + values[1:even:2]
        values = pairs if even == len(values) else torch.cat([pairs, values[even:]])
    return values[0]


Value = Tensor | float


def mean_over_virtual_ranks(
    tree: TreeSum, block: Span, values: Value | Sequence[Value], weights: Sequence[float] | None = None
) -> Tensor:
    """The weighted mean of values that virtual ranks have computed, added in float64 along the tree.

    Ranks: all, with values of equal shapes.

    Args:
        tree: of the group.
        block: the virtual ranks that this process plays.
        values: those of this process's turns in their order, equally many for each virtual rank.
        weights: of each; default: all equal.

    Returns:
        A tensor of the values' shape; of their dtype if that is a float's, else float64.

    Raises:
        WorldError: there are not equally many values for each virtual rank, or all weights are zero.
    """
    listed = list(values) if isinstance(values, (list, tuple)) else [values]
    tensors = [value if isinstance(value, Tensor) else torch.tensor(value) for value in listed]
    num_played = block.stop - block.start
    if not tensors or len(tensors) % num_played or (weights is not None and len(weights) != len(tensors)):
        raise WorldError(
            f"{len(tensors)} values and {len(tensors) if weights is None else len(weights)} weights for "
            f"{num_played} virtual ranks: give one of each per micro-batch, in the order of their turns"
        )
    device = collectives.device_of(tree.group)
    scales = [1.0] * len(tensors) if weights is None else [float(weight) for weight in weights]
    rows = [
        torch.cat([tensor.detach().to(device, torch.float64).reshape(-1), torch.ones(1, device=device)])
        * scale
        for tensor, scale in zip(tensors, scales, strict=True)
    ]
    sums: PartialSums[Tensor] = PartialSums(block, tree.virtual_size, torch.Tensor.add_)
    each = len(rows) // num_played
    for first in range(0, len(rows), each):
        sums.push(functools.reduce(torch.Tensor.add_, rows[first : first + each]))
    parts = list(sums.parts().values())
    total = tree.total(parts, parts[-1])
    if total[-1] == 0:
        raise WorldError("a mean over weights that are all zero")
    like = tensors[0]
    mean = (total[:-1] / total[-1]).view(like.shape).to(like.device)
    return mean.to(like.dtype) if like.is_floating_point() and isinstance(listed[0], Tensor) else mean
