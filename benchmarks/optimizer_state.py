"""Bytes of AdamW's state per rank: replicated, and with the sharded optimizer.

    python benchmarks/optimizer_state.py

Bytes, not time: ranks are threads of this process, and the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import samestep
from samestep.bench.models import WORKLOADS, Workload
from samestep.testing import thread_ranks

sys.path.insert(0, str(Path(__file__).parent))
from _paired import publish


def state_bytes(workload: Workload, group: dist.ProcessGroup) -> int:
    model, loss_of = workload.make(torch.device("cpu"))
    wrapped = samestep.DistributedDataParallel(model, process_group=group)
    optimizer = samestep.ShardedOptimizer(wrapped, torch.optim.AdamW)
    loss_of(wrapped).backward()
    optimizer.step()
    return optimizer.state_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="write the table between the marks of this page")
    options = parser.parse_args()

    header = ["model", "ranks", "replicated", "sharded, largest share", "of 1 / ranks"]
    table, record = [], []
    for name in options.models:
        workload = WORKLOADS[name]
        (whole,) = thread_ranks(partial(state_bytes, workload), 1)
        for size in options.ranks:
            parts = thread_ranks(partial(state_bytes, workload), size)
            record.append({"model": name, "ranks": size, "replicated": whole, "sharded": parts})
            most = max(parts)
            table.append([workload.title, str(size), f"{whole:,}", f"{most:,}", f"{most * size / whole:.4f}"])
    publish(
        "AdamW's state, bytes per rank",
        header,
        table,
        record=record,
        json_path=options.json,
        page=options.page,
        marker="optimizer-state",
    )


if __name__ == "__main__":
    main()
