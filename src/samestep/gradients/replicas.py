"""Replicas that begin alike: what each rank wrapped is compared, then rank 0's values go to all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from samestep import collectives
from samestep.errors import ReplicaMismatchError
from samestep.gradients.buckets import ParameterInfo

__all__ = ["broadcast_tensors", "verify_replicas"]

_CHUNK_BYTES = 64 * 1024 * 1024
_MOST_LINES = 12


def verify_replicas(parameters: Sequence[ParameterInfo], group: dist.ProcessGroup) -> None:
    """Return if all ranks hold parameters of the same names, shapes, strides and dtypes, in one order.

    Ranks: all, in the same order as their other collectives; all raise, or none does.

    Raises:
        ReplicaMismatchError: they do not; the message is the table of differences.
    """
    mine = [[p.name, list(p.shape), _strides_that_matter(p), p.dtype, p.sparse, p.place] for p in parameters]
    everyones = collectives.exchange_json(mine, group)
    if any(rows != everyones[0] for rows in everyones):
        raise ReplicaMismatchError(_difference(everyones))


def _strides_that_matter(parameter: ParameterInfo) -> list[int]:
    # A dimension of size 1 is never stepped along: its stride is noise.
    pairs = zip(parameter.shape, parameter.stride, strict=True)
    return [stride if size > 1 else 0 for size, stride in pairs]


def _difference(everyones: list[list[list[object]]]) -> str:
    by_name = [{str(row[0]): row for row in rows} for rows in everyones]
    names = list(dict.fromkeys(name for rows in by_name for name in rows))
    lines = []
    for name in names:
        found = [rows.get(name) for rows in by_name]
        if all(row == found[0] for row in found):
            continue
        lines.append(f"  {name}: " + "; ".join(f"rank {r}: {_text(row)}" for r, row in enumerate(found)))
    if not lines:
        lines = [
            f"  rank {r} has them in another order, from {_first_change(rows, everyones)} on"
            for r, rows in enumerate(everyones)
            if rows != everyones[0]
        ]
    counts = ", ".join(f"rank {r} has {len(rows)}" for r, rows in enumerate(everyones))
    more = len(lines) - _MOST_LINES
    tail = [f"  ... and {more} more"] if more > 0 else []
    return (
        f"the ranks wrapped different models ({counts} parameters): build the same one on every rank, "
        "before wrapping it\n" + "\n".join(lines[:_MOST_LINES] + tail)
    )


def _first_change(rows: list[list[object]], everyones: list[list[list[object]]]) -> object:
    return next((a[0] for a, b in zip(rows, everyones[0], strict=False) if a != b), "the last ones")


def _text(row: list[object] | None) -> str:
    if row is None:
        return "absent"
    _, shape, stride, dtype, sparse, _ = row
    return f"{dtype} {shape}, strides {stride}" + (", sparse gradient" if sparse else "")


def broadcast_tensors(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, *, src: int = 0) -> None:
    """Each of `tensors` holds rank `src`'s values: in place, few large messages.

    Ranks: all, with tensors of equal shapes and dtypes in the same order.
    Memory: a copy of at most 64 MiB, or of the largest tensor.
    """
    if group.size() == 1:
        return
    for chunk in _chunks(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in chunk])
        # Bits, not numbers: every backend moves bytes, not every one moves bool, complex or float8.
        collectives.broadcast(flat.view(torch.uint8), group, src=src).wait()
        if group.rank() == src:
            continue
        offset = 0
        for tensor in chunk:
            part = flat[offset : offset + tensor.numel()].view(tensor.shape)
            # Through .data: not a change that autograd should take for an in-place update by the user.
            tensor.data.copy_(part)
            offset += tensor.numel()


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in by_kind.values():
        chunk: list[torch.Tensor] = []
        chunk_bytes = 0
        for tensor in alike:
            tensor_bytes = tensor.numel() * tensor.element_size()
            if chunk and chunk_bytes + tensor_bytes > _CHUNK_BYTES:
                yield chunk
                chunk, chunk_bytes = [], 0
            chunk.append(tensor)
            chunk_bytes += tensor_bytes
        yield chunk
