"""What sameness costs: sums along the tree, and one process playing several virtual ranks.

    samestep run --nproc 2 benchmarks/sameness.py        # V = W: along the tree against a plain all-reduce
    samestep run --nproc 1 benchmarks/sameness.py        # W = 1: V = 4 against V = 1, same global batch

Both take turns in one run; the figure is the ratio within each round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import samestep
from samestep.bench.models import WORKLOADS
from samestep.bench.timing import Step, make_step, ratios, spread, time_rounds
from samestep.virtual import VirtualRanks, virtual_ranks

sys.path.insert(0, str(Path(__file__).parent))
from _paired import machine, publish

Variants = dict[str, Step]
NUM_VIRTUAL_RANKS = 4
PLAIN, TREE = "plain all-reduce", "along the tree"


def along_the_tree(name: str, world: samestep.World, group: dist.ProcessGroup) -> Variants:
    """V = W: the same model with and without."""
    found = {}
    for title, deterministic in ((PLAIN, False), (TREE, True)):
        torch.manual_seed(0)
        model, loss_of = WORKLOADS[name].make(world.device)
        wrapped = samestep.DistributedDataParallel(model, process_group=group, deterministic=deterministic)
        found[title] = make_step(wrapped, loss_of)
    return found


def several_virtual_ranks(name: str, world: samestep.World, group: dist.ProcessGroup) -> Variants:
    """W = 1: four virtual ranks with a batch each, against one with all four batches."""
    workload = WORKLOADS[name]
    drawn = [workload.batch() for _ in range(NUM_VIRTUAL_RANKS)]
    batches = [tuple(tensor.to(world.device) for tensor in batch) for batch in drawn]
    joined = tuple(torch.cat(tensors) for tensors in zip(*batches, strict=True))

    def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    def make(virtual_size: int) -> tuple[nn.Module, torch.optim.Optimizer, VirtualRanks]:
        virtual = VirtualRanks(0, 1, virtual_size=virtual_size, seed=0, device=world.device)
        virtual_ranks(group, attach=virtual)
        torch.manual_seed(0)
        model = samestep.DistributedDataParallel(workload.build().to(world.device), process_group=group)
        return model, torch.optim.AdamW(model.parameters()), virtual

    def step_of(virtual_size: int) -> Step:
        model, optimizer, virtual = make(virtual_size)
        mine = batches if virtual_size > 1 else [joined]
        count = iter(range(sys.maxsize))

        def step() -> None:
            optimizer.zero_grad()
            number = next(count)
            for position, batch in enumerate(mine):
                with virtual.play(position, number):
                    loss_of(model, *batch).backward()
            optimizer.step()

        return step

    return {"V = 1": step_of(1), f"V = {NUM_VIRTUAL_RANKS}": step_of(NUM_VIRTUAL_RANKS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="write the table between the marks of this page")
    options = parser.parse_args()

    with samestep.World(backend="gloo") as world:
        variants: Callable[..., Variants] = along_the_tree if world.size > 1 else several_virtual_ranks
        table, record = [], {}
        for name in options.models:
            steps = variants(name, world, world.group)
            base, ours = steps
            times = time_rounds(steps, options.rounds, world.group, world.device)
            medians = [f"{statistics.median(times[title]) * 1e3:.1f} ms" for title in (base, ours)]
            table.append([WORKLOADS[name].title, *medians, spread(ratios(times, ours, base))])
            record[name] = times
        if not world.is_main:
            return
        where = {"num_ranks": world.size, "backend": "Gloo", **machine()}
        publish(
            "The cost of sameness: one training step, AdamW",
            ["model", base, ours, "ratio: median (min .. max)"],
            table,
            where=where,
            record={"machine": where, "times_s": record},
            json_path=options.json,
            page=options.page,
            marker="sameness" if world.size > 1 else "virtual-ranks",
        )


if __name__ == "__main__":
    main()
