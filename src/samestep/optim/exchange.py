"""What ranks tell each other about an optimizer: whether they built the same one, and its state, whole."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep import collectives
from samestep.errors import OptimizerError
from samestep.optim.flat import FlatBucket
from samestep.optim.layout import Piece
from samestep.optim.state import PartState, TensorSpec, flat_view

__all__ = ["gather_states", "verify_alike"]

Owned = Sequence[tuple[FlatBucket, Piece, PartState]]


def verify_alike(what: Any, group: dist.ProcessGroup) -> None:
    """Return if all ranks have said the same.

    Ranks: all; all raise, or none does.

    Raises:
        OptimizerError: they did not.
    """
    if group.size() == 1:
        return
    everyones = collectives.exchange_json(what, group)
    other = next((rank for rank, said in enumerate(everyones) if said != everyones[0]), None)
    if other is not None:
        first, second = everyones[0], everyones[other]
        key = next((k for k in first if first[k] != second.get(k)), "")
        raise OptimizerError(
            f"the ranks shard different optimizers: {key} is {_short(first.get(key))} on rank 0 and "
            f"{_short(second.get(key))} on rank {other}. Build the same one over the same parameters, in the "
            "same order, on every rank"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def gather_states(owned: Owned, group: dist.ProcessGroup, *, keep: bool = True) -> dict[int, dict[str, Any]]:
    """The state of every parameter that has any, whole, in torch's own form.

    Ranks: all. One that does not `keep` it gets nothing.
    Memory: beside the result, one rank's part of it at a time.
    """
    owned = [(bucket, piece, part) for bucket, piece, part in owned if part]
    mine = [_described(piece, part) for _, piece, part in owned]
    everyones = collectives.exchange_json(mine, group)
    device = owned[0][0].buffer.device if owned else collectives.device_of(group)
    states: dict[int, dict[str, Any]] = {}
    for rank, rows in enumerate(everyones):
        tensors = [t for _, _, part in owned for t in part.tensors.values()] if rank == group.rank() else None
        for row in rows:
            state = states.setdefault(row["parameter"], {})
            for key, value in row["values"].items():
                state.setdefault(key, _decoded(value))
        _spread(rows, tensors, states, rank, group, device)
    return {number: states[number] for number in sorted(states)} if keep else {}


def _spread(
    rows: list[dict[str, Any]],
    mine: list[Tensor] | None,
    states: dict[int, dict[str, Any]],
    src: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Rank `src`'s tensors, which `rows` describe, are copied to their places in `states`."""
    parts = [(row, key, spec, numel) for row in rows for key, (spec, numel) in row["tensors"].items()]
    for dtype in sorted({spec[2] for _, _, spec, _ in parts}):
        chosen = [i for i, (_, _, spec, _) in enumerate(parts) if spec[2] == dtype]
        numel = sum(parts[i][3] for i in chosen)
        if mine is not None:
            sent = torch.cat([mine[i].reshape(-1) for i in chosen])
        else:
            sent = torch.empty(numel, dtype=getattr(torch, dtype), device=device)
        if group.size() > 1 and numel:
            collectives.broadcast(sent.view(torch.uint8), group, src=src).wait()
        offset = 0
        for i in chosen:
            row, key, (shape, stride, _), count = parts[i]
            state = states[row["parameter"]]
            if key not in state:
                state[key] = TensorSpec(tuple(shape), tuple(stride), sent.dtype).empty(device)
            flat_view(state[key])[row["start"] : row["start"] + count].copy_(sent[offset : offset + count])
            offset += count


def _described(piece: Piece, part: PartState) -> dict[str, Any]:
    return {
        "parameter": piece.parameter,
        "start": piece.start,
        "values": {key: _encoded(key, value) for key, value in part.values.items()},
        "tensors": {
            key: [[list(spec.shape), list(spec.stride), _name(spec.dtype)], part.tensors[key].numel()]
            for key, spec in part.specs.items()
        },
    }


def _encoded(key: str, value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return [_name(value.dtype), list(value.shape), base64.b64encode(raw).decode(), str(value.device)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return [value]
    raise OptimizerError(
        f"the optimizer keeps {key} as {type(value).__name__}, which cannot be sent to other ranks: tensors, "
        "numbers, strings and None can"
    )


def _decoded(encoded: list[Any]) -> Any:
    if len(encoded) == 1:
        return encoded[0]
    dtype, shape, raw, device = encoded
    data = bytearray(base64.b64decode(raw))
    flat = torch.frombuffer(data, dtype=getattr(torch, dtype)) if data else torch.empty(0)
    kind = torch.device(device).type
    found = flat.to(getattr(torch, dtype)).view(shape).clone()
    return found if kind == "cpu" else found.to(kind)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
