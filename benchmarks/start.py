"""From the command to the end of the first training step: `samestep run` and torchrun, of the same script.

    python benchmarks/start.py --page docs/benchmarks.md

The script makes a process group over Gloo with torch's own functions, wraps a small model in torch's
DistributedDataParallel, and steps once: what differs is the launcher alone. A second row takes samestep's
world and wrapper instead, under `samestep run`, against torch's under torchrun: what a user gets.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from _paired import compare, report

TORCHS_SCRIPT = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(8, 256)).sum().backward()
optimizer.step()
open(f"{sys.argv[1]}/{dist.get_rank()}", "w").write(str(time.time()))
dist.destroy_process_group()
"""
OUR_SCRIPT = """
import sys, time
import torch
from torch import nn
import samestep
with samestep.World() as world:
    model = samestep.DistributedDataParallel(nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 256)).sum().backward()
    optimizer.step()
    open(f"{sys.argv[1]}/{world.rank}", "w").write(str(time.time()))
"""
OURS = [sys.executable, "-m", "samestep", "run", "--nproc", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def first_step_s(launcher: list[str], script: str) -> float:
    """Seconds from starting the command until the last rank has made its first step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        path.write_text(script)
        start_s = time.time()
        subprocess.run(
            [*launcher, str(path), folder],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            check=True,
            capture_output=True,
        )
        return max(float(Path(folder, str(rank)).read_text()) for rank in range(2)) - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="write the table between the marks of this page")
    options = parser.parse_args()
    torch.set_num_threads(1)  # for the report: the ranks'
    rows = [
        compare(
            name,
            lambda script=script: first_step_s(OURS, script),
            lambda: first_step_s(TORCHRUN, TORCHS_SCRIPT),
            num_rounds=options.rounds,
        )
        for name, script in (
            ("the same script, torch's classes", TORCHS_SCRIPT),
            ("our world and wrapper, against torch's", OUR_SCRIPT),
        )
    ]
    report(
        "Command to the end of the first step, 2 ranks: samestep run / torchrun",
        rows,
        json_path=options.json,
        page=options.page,
        marker="start",
    )


if __name__ == "__main__":
    main()
