"""`gather`: the results of all ranks as one, in the order of the data set.

[Note: Rows] What is gathered is a structure of *columns*. A column is a tensor or array whose first dimension
counts rows, or a list, whose items' rows follow each other: so results may be appended batch by batch, and a
rank that ran no batch has an empty list and learns from the others what it would hold. A number is one row.
Dicts and tuples only hold columns.

Two exchanges carry everything, however many columns there are: the descriptions, as JSON, so that nothing a
rank receives is ever unpickled; then all columns of a rank as one run of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from samestep import collectives
from samestep.columns import Layout, describe, merge, normalise, pack, unpack
from samestep.errors import DataError

__all__ = ["SharesRows", "gather"]


class SharesRows(Protocol):
    """What shared out the samples, and so knows whose rows stand where: a sampler or loader of ours."""

    def rows_by_rank(self, num_rows: Sequence[int]) -> list[npt.NDArray[np.int64]]:
        """For each rank, where its first `num_rows[rank]` rows belong. Does not communicate.

        Raises:
            DataError: a rank has more rows than it was handed samples.
        """
        ...


def gather(
    value: Any,
    group: dist.ProcessGroup,
    *,
    of: SharesRows | None = None,
    dst: int | None = None,
    pad: float | None = None,
) -> Any:
    """What `samestep.gather` returns, over `group`."""
    if dst is not None and not 0 <= dst < group.size():
        raise DataError(f"dst={dst} is not in 0..{group.size() - 1}")
    try:
        node, problem = normalise(value), None
        text = describe(node, pad=pad is not None)
    except DataError as error:
        text, problem = {"kind": "error", "text": str(error)}, error
    texts = collectives.exchange_json(text, group)
    if problem is not None:
        raise problem
    for rank, other in enumerate(texts):
        if other["kind"] == "error":
            raise DataError(f"rank {rank} has nothing to gather: {other['text']}")
    layout = merge(texts, pad=pad is not None)
    order = None if of is None else _order(layout, of, group.size())
    num_bytes = max(sum(c.num_bytes(rank) for c in layout.columns()) for rank in range(group.size()))
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=collectives.device_of(group))
    pack(node, layout, group.rank(), buffer, pad=pad)
    if num_bytes == 0:
        buffers: list[torch.Tensor] | None = [buffer] * group.size()
    elif dst is None:
        buffers = collectives.all_gather(buffer, group)
    else:
        buffers = collectives.gather(buffer, group, dst=dst)
    if buffers is None or dst not in (None, group.rank()):
        return None
    return unpack(buffers, node, layout, order)


def _order(layout: Layout, of: SharesRows, num_ranks: int) -> npt.NDArray[np.int64]:
    """The numbers of all ranks' rows in the order of the data set; a sample that came twice is there once."""
    columns = list(layout.columns())
    counts = columns[0].num_rows if columns else (0,) * num_ranks
    for column in columns:
        if column.num_rows != counts:
            raise DataError(
                f"{column.path} has {list(column.num_rows)} rows on the ranks and {columns[0].path} "
                f"{list(counts)}: with `of`, every column has one row per sample"
            )
    places = np.concatenate(of.rows_by_rank(counts))
    return np.unique(places, return_index=True)[1]
