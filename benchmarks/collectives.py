"""All-reduce from 4 B to 100 MB: "shm" against Gloo and MPICH, in the same processes, taking turns.

    python benchmarks/collectives.py                      # 2 ranks
    python benchmarks/collectives.py --ranks 4 --json collectives-4.json

MPICH takes part when `mpiexec` and mpi4py are installed (`pip install mpich mpi4py`), here or in the
environment that `--mpi` names. "shm in place" reduces tensors that lie in shared memory, as gradient buckets
do.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from _paired import machine, write_between_markers

KB, MB = 1024, 1024 * 1024
SIZES = [4, 256, 4 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 25 * MB, 100 * MB]
NUM_ROUNDS = 7
ROUND_S = 0.15  # how long each variant runs in each round, about
Variant = Callable[[], Any]


def main() -> None:
    options = parse_options()
    if options.place is not None:
        run_rank(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        launch(options, f"{folder}/store")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=SIZES)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help=f"default: {NUM_ROUNDS}")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its markers")
    parser.add_argument("--mpi", type=Path, help="environment where mpich and mpi4py are installed")
    parser.add_argument("--place", help=argparse.SUPPRESS)  # of a rank: "file rank"
    return parser.parse_args()


def launch(options: argparse.Namespace, store: str) -> None:
    """Run this script once per rank, under mpiexec if there is one."""
    prefix = options.mpi or Path(sys.prefix)
    mpiexec = shutil.which("mpiexec", path=str(prefix / "bin"))
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    if options.mpi:
        packages = next((options.mpi / "lib").glob("python*/site-packages"))
        environment["PYTHONPATH"] = str(packages)
        environment["LD_LIBRARY_PATH"] = str(options.mpi / "lib")
    command = [sys.executable, *sys.argv, "--place"]
    if mpiexec is not None:
        ranks = [[mpiexec, "-n", str(options.ranks), *command, store]]
    else:
        print("no mpiexec here: without MPICH (pip install mpich mpi4py)")
        ranks = [[*command, f"{store} {rank}"] for rank in range(options.ranks)]
    processes = [subprocess.Popen(rank, env=environment) for rank in ranks]
    sys.exit(max(process.wait() for process in processes))


def run_rank(options: argparse.Namespace) -> None:
    from samestep.shm import register

    store, _, number = options.place.partition(" ")
    rank = int(number or os.environ["PMI_RANK"])
    torch.set_num_threads(1)
    register()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, options.ranks),
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=60),
    )
    shm = dist.new_group(backend="shm")
    mpi = find_mpi()
    rows = []
    for num_bytes in options.sizes:
        rows.append(measure(num_bytes, variants(num_bytes, shm, mpi), options.rounds))
        if rank == 0:
            print(line_of(rows[-1]), flush=True)
    if rank == 0:
        report(rows, options)
    dist.barrier()
    dist.destroy_process_group()


def find_mpi() -> Any:
    """The MPI module if these processes were started by mpiexec."""
    if "PMI_RANK" not in os.environ or importlib.util.find_spec("mpi4py") is None:
        return None
    from mpi4py import MPI

    return MPI


def variants(num_bytes: int, shm: Any, mpi: Any) -> dict[str, Variant]:
    """Each all-reduces a tensor of its own; values stay what they are, so any number of times can be run."""
    numel = num_bytes // 4
    private, other = torch.zeros(numel), torch.zeros(numel)
    shared = shm.empty_shared(numel, torch.float32).zero_()
    found: dict[str, Variant] = {
        "shm": lambda: dist.all_reduce(private, group=shm),
        "shm in place": lambda: dist.all_reduce(shared, group=shm),
        "gloo": lambda: dist.all_reduce(other),
    }
    if mpi is not None:
        array = torch.zeros(numel).numpy()
        found["mpich"] = lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, array)
    return found


def measure(num_bytes: int, contenders: dict[str, Variant], num_rounds: int) -> dict[str, Any]:
    """Seconds per call of each variant in each round."""
    repeats = {}
    for name, call in contenders.items():
        call()
        started = time.perf_counter()
        for _ in range(3):
            call()
        # All ranks must agree on the number of calls.
        each = torch.tensor([(time.perf_counter() - started) / 3])
        dist.all_reduce(each, dist.ReduceOp.MAX)
        repeats[name] = max(3, min(2000, int(ROUND_S / each.item())))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(num_rounds):
        for name, call in contenders.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            seconds[name].append((time.perf_counter() - started) / repeats[name])
    return {"num_bytes": num_bytes, "seconds": seconds}


def ratios(row: dict[str, Any], slow: str, fast: str) -> list[float]:
    """How many times faster `fast` was, per round."""
    seconds = row["seconds"]
    return [one / other for one, other in zip(seconds[slow], seconds[fast], strict=True)]


def cells(row: dict[str, Any]) -> list[str]:
    seconds = row["seconds"]
    num_bytes = row["num_bytes"]

    def time_of(name: str) -> str:
        if name not in seconds:
            return "-"
        median = statistics.median(seconds[name])
        return f"{median * 1e6:.0f} us" if num_bytes < MB else f"{num_bytes / median / 1e9:.2f} GB/s"

    def times(slow: str, fast: str) -> str:
        if slow not in seconds:
            return "-"
        each = ratios(row, slow, fast)
        return f"{statistics.median(each):.2f} ({min(each):.2f} .. {max(each):.2f})"

    size = f"{num_bytes // MB} MB" if num_bytes >= MB else f"{num_bytes / KB:g} KB"
    return [
        size if num_bytes >= KB else f"{num_bytes} B",
        *(time_of(name) for name in ("shm", "shm in place", "gloo", "mpich")),
        times("gloo", "shm"),
        times("gloo", "shm in place"),
        times("mpich", "shm"),
        times("mpich", "shm in place"),
    ]


HEADER = [
    "size",
    "shm",
    "shm in place",
    "Gloo",
    "MPICH",
    "shm is faster than Gloo",
    "in place than Gloo",
    "shm than MPICH",
    "in place than MPICH",
]


def line_of(row: dict[str, Any]) -> str:
    return "  ".join(cell.rjust(20) if "(" in cell else cell.rjust(10) for cell in cells(row))


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    about = {**machine(), "ranks": options.ranks, "rounds": options.rounds}
    if options.ranks > (os.cpu_count() or 1):
        about["note"] = "more ranks than cores"
    table = [HEADER, ["---"] * len(HEADER), *(cells(row) for row in rows)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in table)
    where = ", ".join(f"{key.removeprefix('num_')} {value}" for key, value in about.items())
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    if options.page:
        write_between_markers(options.page, f"collectives-{options.ranks}", f"{text}\n\n{where}")
    print(f"\n{text}\n\n{where}\ntimes as fast: median of the rounds (min .. max)")


if __name__ == "__main__":
    main()
