"""Buffers of virtual ranks (BatchNorm's running statistics): alike when a step starts, averaged at its end.

[Note: Buffers in a step] Every virtual rank's forward begins with the buffers that the step began with, and
leaves its own values. Their mean over the virtual ranks is made along the tree, by the same weights as that
of the gradients, and becomes the buffers of the next step. A buffer that no virtual rank has changed stays
as it is, to the bit. Whole numbers and truth values (`num_batches_tracked`) have no mean: they are virtual
rank 0's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samestep import collectives
from samestep.gradients.turns import Turns
from samestep.reduction import PendingSum, TreeSum
from samestep.tree import PartialSums

__all__ = ["BufferMean"]

Named = dict[str, Tensor]


@dataclass
class _Step:
    """What one step has seen so far."""

    before: Named  # the buffers that it began with
    sums: dict[torch.dtype, PartialSums[Tensor]]
    first: Named  # those without a mean, as virtual rank 0 left them
    weight: float = 0.0  # of the micro-batches so far of the virtual rank at hand
    pending: list[tuple[list[str], PendingSum]] = field(default_factory=list)
    broadcast: tuple[Tensor, collectives.Work] | None = None


class BufferMean:
    """Keeps the buffers of one module the same for all virtual ranks.

    Ranks: all make one; the last backward of each step is a collective for it.

    Args:
        named_buffers: called for the buffers as they are now, by name.
        tree: sums over the group.
        turns: the reducer's.
    """

    def __init__(self, named_buffers: Callable[[], Named], tree: TreeSum, turns: Turns) -> None:
        self._named_buffers = named_buffers
        self._tree = tree
        self._virtual = turns.virtual
        self._step: _Step | None = None

    def before_forward(self) -> None:
        """A training forward begins."""
        if self._step is None:
            virtual = self._virtual
            before = {name: buffer.detach().clone() for name, buffer in self._named_buffers().items()}
            self._step = _Step(
                before,
                {
                    dtype: PartialSums(virtual.block, virtual.virtual_size, torch.Tensor.add_)
                    for dtype in _dtypes_with_mean(before)
                },
                first={},
            )

    @torch.no_grad()
    def keep(self, turns: Turns) -> None:
        """A turn that is not the last is over: its buffers wait, and the next one has those before."""
        step = self._step
        if step is None:
            return
        step.weight += turns.weight
        if turns.ends_virtual_rank:
            self._push(step)
            for name, buffer in self._named_buffers().items():
                buffer.data.copy_(step.before[name])

    @torch.no_grad()
    def start(self, turns: Turns) -> None:
        """The last turn's backward is ending: the mean over all virtual ranks is under way.

        Ranks: all.
        """
        step = self._step
        if step is None:
            return
        step.weight += turns.weight
        self._push(step)
        for dtype, sums in step.sums.items():
            parts = list(sums.parts().values())
            names = [name for name, buffer in step.before.items() if buffer.dtype == dtype]
            step.pending.append((names, self._tree.start(parts, parts[-1])))
        if step.first and self._tree.group.size() > 1:
            flat = torch.cat([_bytes(buffer) for buffer in step.first.values()])
            step.broadcast = flat, collectives.broadcast(flat, self._tree.group, src=0)

    @torch.no_grad()
    def finish(self) -> None:
        """The step is over: the buffers are the means."""
        step, self._step = self._step, None
        if step is None:
            return
        now = self._named_buffers()
        for names, pending in step.pending:
            pending.wait()
            _take_means(now, step.before, names, pending.out)
        if step.broadcast is not None:
            flat, work = step.broadcast
            work.wait()
            offset = 0
            for buffer in step.first.values():
                part = flat[offset : offset + buffer.numel() * buffer.element_size()]
                _bytes(buffer).copy_(part)
                offset += part.numel()
        for name, buffer in step.first.items():
            now[name].data.copy_(buffer)

    def drop(self) -> None:
        """The step is void; the buffers are those that it began with."""
        step, self._step = self._step, None
        if step is not None:
            for name, buffer in self._named_buffers().items():
                buffer.data.copy_(step.before[name])

    def _push(self, step: _Step) -> None:
        now = self._named_buffers()
        if not step.first:
            step.first = {
                name: now[name].detach().clone(memory_format=torch.contiguous_format)
                for name, buffer in step.before.items()
                if not _has_mean(buffer)
            }
        scale = step.weight / self._virtual.virtual_size
        step.weight = 0.0
        for dtype, sums in step.sums.items():
            names = [name for name, buffer in step.before.items() if buffer.dtype == dtype]
            changed = [not _same_bits(now[name], step.before[name]) for name in names]
            values = [now[name].detach().reshape(-1) * scale for name in names]
            flags = torch.tensor(changed, dtype=torch.float32).to(values[0])
            sums.push(torch.cat([*values, flags]))


def _take_means(now: Named, before: Named, names: Sequence[str], total: Tensor) -> None:
    changed = total[total.numel() - len(names) :].tolist()
    offset = 0
    for name, flag in zip(names, changed, strict=True):
        numel = before[name].numel()
        mean = total[offset : offset + numel].view(before[name].shape)
        now[name].data.copy_(mean if flag else before[name])
        offset += numel


def _has_mean(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _dtypes_with_mean(buffers: Named) -> list[torch.dtype]:
    return list(dict.fromkeys(buffer.dtype for buffer in buffers.values() if _has_mean(buffer)))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(_bytes(one.contiguous()), _bytes(other.contiguous()))  # NaN equals itself here


def _bytes(buffer: Tensor) -> Tensor:
    return buffer.view(-1).view(torch.uint8)
