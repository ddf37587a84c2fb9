"""A training step with and without the allocator settings that `samestep run` gives its ranks on glibc.

    python benchmarks/allocator.py --page docs/benchmarks.md

Each round starts two runs of two ranks, one with these settings and one under torchrun, which leaves the
allocator alone, and takes the median step of the slower rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import samestep
from samestep.bench.models import WORKLOADS, Workload
from samestep.bench.timing import make_step, time_rounds

sys.path.insert(0, str(Path(__file__).parent))
from _paired import compare, report

NUM_THREADS = 1
OURS = ["samestep", "run", "--nproc", "2"]
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2"]  # leaves the allocator alone


def time_steps(workload: Workload, num_steps: int, path: Path) -> None:
    """What a rank does."""
    with samestep.World(backend="gloo") as world:
        model, loss_of = workload.make(world.device)
        steps = {"step": make_step(samestep.DistributedDataParallel(model), loss_of)}
        times = time_rounds(steps, num_steps, world.group, world.device, steps_per_round=1)["step"]
        if world.is_main:
            path.write_text(str(statistics.median(times)))


def run(model: str, num_steps: int, launcher: list[str]) -> float:
    """Seconds per step of a run of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds"
        script = [__file__, "--models", model, "--steps", str(num_steps), "--write", str(path)]
        subprocess.run(
            [sys.executable, "-m", *launcher, *script],
            env={**os.environ, "OMP_NUM_THREADS": str(NUM_THREADS), "GLOO_SOCKET_IFNAME": "lo"},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return float(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--page", type=Path, help="write the table between the marks of this page")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        time_steps(WORKLOADS[options.models[0]], options.steps, options.write)
        return
    torch.set_num_threads(NUM_THREADS)  # for the report: the ranks'
    rows = [
        compare(
            WORKLOADS[name].title,
            lambda name=name: run(name, options.steps, OURS),
            lambda name=name: run(name, options.steps, TORCHRUN),
            num_rounds=options.rounds,
            unit="ms",
            scale=1e3,
        )
        for name in options.models
    ]
    report(
        "A step with the launcher's allocator settings, and without",
        rows,
        page=options.page,
        marker="allocator",
    )


if __name__ == "__main__":
    main()
