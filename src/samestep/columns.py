"""Columns of rows: results as a rank hands them in, what all ranks' look like together, and from bytes back.

Pure: it knows no process group. [Note: Rows] in gathering.py says what a column is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.errors import DataError

__all__ = ["Layout", "Node", "describe", "merge", "normalise", "pack", "unpack"]

_ALIGNMENT = 16  # bytes; a column's bytes begin at a multiple, so that any dtype can be read in place
_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


@dataclass(frozen=True)
class Node:
    """A part of what one rank hands in: a dict or tuple of parts, or a column.

    "nothing" is an empty list: no batch was seen, so no more is known than that there are no rows.
    """

    kind: str  # "dict", "tuple", "column" or "nothing"
    names: tuple[Any, ...] = ()
    children: tuple[Node, ...] = ()
    make: Callable[..., Any] | None = None  # a named tuple's class
    pieces: tuple[Tensor, ...] = ()  # of a column: rows that follow each other
    is_array: bool = False  # numpy's, and to become so again

    def child(self, number: int) -> Node:
        return self.children[number] if self.children else _NOTHING


_NOTHING = Node("nothing")


@dataclass(frozen=True)
class Layout:
    """A part of what all ranks hand in together."""

    kind: str
    names: tuple[Any, ...] = ()
    children: tuple[Layout, ...] = ()
    path: str = ""
    dtype: torch.dtype = torch.float32
    tail: tuple[int, ...] = ()  # the shape of a row
    num_rows: tuple[int, ...] = ()  # of each rank
    is_array: bool = False

    def columns(self) -> Iterator[Layout]:
        """All columns, in the order of their bytes."""
        if self.kind == "column":
            yield self
        for child in self.children:
            yield from child.columns()

    def num_bytes(self, rank: int) -> int:
        """The bytes of `rank`'s rows of this column, up to where the next one begins."""
        return -(-self.num_rows[rank] * self.row_bytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return int(np.prod(self.tail, dtype=np.int64)) * self.dtype.itemsize


def normalise(value: Any, path: str = "the value") -> Node:
    """`value` as dicts and tuples of columns.

    Raises:
        DataError: it holds something that has no rows; the message says where.
    """
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise DataError(f"{path} has the key {key!r}: keys must be strings or whole numbers")
        children = tuple(normalise(item, f"{path}[{key!r}]") for key, item in value.items())
        return Node("dict", tuple(value), children)
    if isinstance(value, tuple | list):
        children = tuple(normalise(item, f"{path}[{i}]") for i, item in enumerate(value))
        if isinstance(value, list):
            return _joined(children, path)
        return Node("tuple", tuple(range(len(children))), children, getattr(type(value), "_make", None))
    return Node("column", pieces=(_rows(value, path),), is_array=isinstance(value, np.ndarray))


def _joined(nodes: Sequence[Node], path: str) -> Node:
    """The rows of `nodes`, which are alike, one after the other."""
    known = [node for node in nodes if node.kind != "nothing"]
    if not known:
        return _NOTHING
    first = known[0]
    if any((node.kind, node.names) != (first.kind, first.names) for node in known):
        raise DataError(f"the items of the list {path} are not alike: a list holds one batch after the other")
    children = tuple(_joined([node.child(i) for node in known], path) for i in range(len(first.names)))
    pieces = tuple(piece for node in known for piece in node.pieces)
    return Node(first.kind, first.names, children, first.make, pieces, first.is_array)


def _rows(value: Any, path: str) -> Tensor:
    try:
        if isinstance(value, np.ndarray | np.generic):
            value = torch.from_numpy(np.array(value))
        elif isinstance(value, float):
            value = torch.tensor(value, dtype=torch.float64)
        elif isinstance(value, int):
            value = torch.tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise DataError(f"{path} is {value!r:.80}, which no tensor can hold") from None
    if not isinstance(value, Tensor):
        raise DataError(
            f"{path} is a {type(value).__name__}: only tensors, arrays and numbers, and dicts, tuples and "
            "lists of them, can be gathered"
        )
    if value.layout is not torch.strided or value.is_quantized:
        raise DataError(f"{path} is a sparse or quantized tensor: gather a plain one (to_dense, dequantize)")
    rows: Tensor = value.detach()
    return rows.reshape(1) if rows.ndim == 0 else rows


def describe(node: Node, path: str = "the value", *, pad: bool = False) -> dict[str, Any]:
    """What the other ranks must know of `node`, as JSON can hold it.

    Raises:
        DataError: the pieces of a column do not fit together.
    """
    text: dict[str, Any] = {"kind": node.kind, "names": list(node.names)}
    text["children"] = [
        describe(child, f"{path}[{name!r}]", pad=pad)
        for name, child in zip(node.names, node.children, strict=True)
    ]
    if node.kind == "column":
        kinds = sorted({(str(p.dtype).removeprefix("torch."), tuple(p.shape[1:])) for p in node.pieces})
        text["num_rows"] = sum(len(piece) for piece in node.pieces)
        text["is_array"] = node.is_array
        text["dtype"], text["tail"] = _common(kinds, path, pad=pad)
    return text


def merge(texts: Sequence[dict[str, Any]], path: str = "the value", *, pad: bool = False) -> Layout:
    """What the ranks' descriptions are together.

    Raises:
        DataError: they do not fit together; the message says where and which ranks differ.
    """
    known = [(rank, text) for rank, text in enumerate(texts) if text["kind"] != "nothing"]
    if not known:
        return Layout("nothing", path=path)
    rank, first = known[0]
    for other, text in known:
        if (text["kind"], text["names"]) != (first["kind"], first["names"]):
            raise DataError(
                f"{path} is a {_says(first)} on rank {rank} and a {_says(text)} on rank {other}: every rank "
                "must gather the same structure"
            )
    nothing = {"kind": "nothing"}
    children = tuple(
        merge(
            [nothing if text["kind"] == "nothing" else text["children"][i] for text in texts],
            f"{path}[{name!r}]",
            pad=pad,
        )
        for i, name in enumerate(first["names"])
    )
    if first["kind"] != "column":
        return Layout(first["kind"], tuple(first["names"]), children, path)
    dtype, tail = _common([(text["dtype"], tuple(text["tail"])) for _, text in known], path, pad=pad)
    return Layout(
        "column",
        path=path,
        dtype=_DTYPES[dtype],
        tail=tail,
        num_rows=tuple(text.get("num_rows", 0) for text in texts),
        is_array=any(text["is_array"] for _, text in known),
    )


def _common(
    kinds: Sequence[tuple[str, tuple[int, ...]]], path: str, *, pad: bool
) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of rows that all of `kinds` fit into."""
    (dtype, tail), *others = kinds
    for other_dtype, other in others:
        if other_dtype != dtype:
            raise DataError(f"{path} has rows of {dtype} and of {other_dtype}: convert them to one dtype")
        if len(other) != len(tail) or (other != tail and not pad):
            raise DataError(
                f"{path} has rows of shape {list(tail)} and of {list(other)}: make them equal"
                + (", or fill them up (pad=...)" if len(other) == len(tail) else "")
            )
        tail = tuple(map(max, tail, other))
    return dtype, tail


def _says(text: dict[str, Any]) -> str:
    names = f" with {', '.join(map(repr, text['names']))}" if text["names"] else ""
    return f"{text['kind']}{names}"


def pack(node: Node, layout: Layout, rank: int, buffer: Tensor, *, pad: float | None = None) -> None:
    """The rows of `node`, which is `rank`'s, lie in `buffer` as `layout` says."""
    start = 0
    for column, pieces in _matched(node, layout):
        rows = [_filled(piece, column.tail, pad) for piece in pieces]
        used = column.num_rows[rank] * column.row_bytes
        if used:
            data = torch.cat(rows).reshape(-1).view(torch.uint8)
            buffer[start : start + used].copy_(data)
        start += column.num_bytes(rank)


def _matched(node: Node, layout: Layout) -> Iterator[tuple[Layout, tuple[Tensor, ...]]]:
    if layout.kind == "column":
        yield layout, node.pieces
    for i, child in enumerate(layout.children):
        yield from _matched(node.child(i), child)


def _filled(piece: Tensor, tail: tuple[int, ...], pad: float | None) -> Tensor:
    if tuple(piece.shape[1:]) == tail:
        return piece.contiguous()
    assert pad is not None
    filled = piece.new_full((len(piece), *tail), pad)
    filled[tuple(slice(n) for n in piece.shape)] = piece
    return filled


def unpack(buffers: Sequence[Tensor], node: Node, layout: Layout, order: np.ndarray[Any, Any] | None) -> Any:
    """The value whose columns hold all ranks' rows: rank after rank, or those at `order` of that.

    Args:
        buffers: of each rank, as `pack` filled them.
        node: this rank's own part: it says on which devices the columns go and which tuples have names.
        layout: of all ranks.
        order: numbers of rows.
    """
    starts = [0] * len(buffers)

    def value_of(part: Node, place: Layout) -> Any:
        if place.kind == "nothing":
            return []
        if place.kind == "column":
            return _column(part, place, buffers, starts, order)
        values = [value_of(part.child(i), child) for i, child in enumerate(place.children)]
        if place.kind == "dict":
            return dict(zip(place.names, values, strict=True))
        return tuple(values) if part.make is None else part.make(values)

    return value_of(node, layout)


def _column(
    part: Node,
    place: Layout,
    buffers: Sequence[Tensor],
    starts: list[int],
    order: np.ndarray[Any, Any] | None,
) -> Any:
    rows = []
    for rank, buffer in enumerate(buffers):
        used = place.num_rows[rank] * place.row_bytes
        data = buffer[starts[rank] : starts[rank] + used].view(place.dtype)
        rows.append(data.reshape(place.num_rows[rank], *place.tail))
        starts[rank] += place.num_bytes(rank)
    column = torch.cat(rows)
    if order is not None:
        column = column[torch.from_numpy(order).to(column.device)]
    if place.is_array:
        return column.cpu().numpy()
    return column.to(part.pieces[0].device) if part.pieces else column
