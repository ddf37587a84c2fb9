"""samestep's samplers and loader beside torch's: start, memory at the start, cost per index and per sample.

    python benchmarks/sampler.py [--rounds 5] [--largest 10000000] [--json FILE] [--page docs/benchmarks.md]

Torch stores the order; from 10**8 samples on it needs gigabytes and minutes, so there ours is timed alone
(`--largest` says how far torch is taken along).
"""

from __future__ import annotations

import argparse
import collections
import os
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from _paired import Comparison, compare, report, seconds
from samestep.data import DataLoader, DistributedSampler, WeightedSampler

NUM_RANKS = 2
BATCH_SIZE = 64


def ours(length: int) -> DistributedSampler:
    return DistributedSampler(range(length), NUM_RANKS, 0)


def theirs(length: int) -> Any:
    return TorchSampler(range(length), NUM_RANKS, 0)  # type: ignore[arg-type]


def start(make: Callable[[int], Any], length: int) -> float:
    """Seconds from nothing to the first index."""
    return seconds(lambda: next(iter(make(length))))


def per_index(make: Callable[[int], Any], length: int) -> float:
    """Seconds per index over a whole epoch, the order's making included."""
    sampler = make(length)
    return seconds(lambda: drain(sampler)) / len(sampler)


def drain(iterable: Any) -> None:
    collections.deque(iterable, maxlen=0)


def memory(make: Callable[[int], Any], length: int) -> float:
    """Bytes by which a fresh process grows, at its highest, up to the first index."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        next(iter(make(length)))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - pages * resource.getpagesize()
        os.write(writing, struct.pack("d", max(float(grown), 4096.0)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        (grown_bytes,) = struct.unpack("d", pipe.read(8))
    os.waitpid(child, 0)
    return float(grown_bytes)


def our_weighted(length: int) -> WeightedSampler:
    return WeightedSampler(torch.rand(length), length // NUM_RANKS, num_replicas=1, rank=0)


def their_weighted(length: int) -> Any:
    return WeightedRandomSampler(torch.rand(length), length // NUM_RANKS)


def our_loader(length: int, *, streams: bool = False) -> DataLoader:
    """Of one process, loading in process, samples that cost nothing: what is left is the loader's own."""
    return DataLoader(range(length), BATCH_SIZE, shuffle=True, sample_streams=streams)


def their_loader(length: int) -> Any:
    return TorchLoader(range(length), BATCH_SIZE, sampler=TorchSampler(range(length), 1, 0))  # type: ignore[arg-type]


def per_sample(loader: Any) -> float:
    """Seconds per sample over a whole epoch."""
    return seconds(lambda: drain(loader)) / len(loader) / BATCH_SIZE


def loader_rows(num_rounds: int) -> list[Comparison]:
    options: dict[str, Any] = {"num_rounds": num_rounds, "unit": "us", "scale": 1e6}
    length = BATCH_SIZE * 1000
    return [
        _row("per draw of an epoch, by weights", per_index_of_weighted, 10**6, num_rounds, "ns", 1e9),
        compare(
            "loader, per sample that costs nothing, in process",
            lambda: per_sample(our_loader(length)),
            lambda: per_sample(their_loader(length)),
            **options,
        ),
        compare(
            "the same, ours with random streams for samples",
            lambda: per_sample(our_loader(length, streams=True)),
            lambda: per_sample(their_loader(length)),
            **options,
        ),
    ]


def per_index_of_weighted(make: Callable[[int], Any], length: int) -> float:
    """Seconds per draw of an epoch, the sampler's making included."""
    sampler = {ours: our_weighted, theirs: their_weighted}[make]
    return seconds(lambda: drain(sampler(length))) / (length // NUM_RANKS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--largest", type=int, default=10**7, help="samples up to which torch is timed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)

    rows: list[Comparison] = []
    for length in (10**6, 10**7, 10**8, 10**9):
        if length > options.largest:
            continue
        rows.append(_row("first index", start, length, options.rounds, "ms", 1e3))
        if sys.platform == "linux":
            rows.append(_row("memory at the first index", memory, length, options.rounds, "MB", 1e-6))
    rows.append(_row("per index of a whole epoch", per_index, 10**6, options.rounds, "ns", 1e9))
    ready = torch.randperm(10**6).tolist()[::NUM_RANKS]
    rows.append(
        compare(
            "per index, against only reading a list that is there",
            lambda: per_index(ours, 10**6),
            lambda: seconds(lambda: drain(ready)) / len(ready),
            num_rounds=options.rounds,
            unit="ns",
            scale=1e9,
        )
    )
    rows += loader_rows(options.rounds)
    report("DistributedSampler", rows, json_path=options.json, page=options.page, marker="sampler")
    for length in (10**8, 10**9):
        best = min(start(ours, length) for _ in range(options.rounds))
        print(f"ours alone, first index of 10**{len(str(length)) - 1}: {best * 1e3:.3f} ms")
        best = min(seconds(lambda n=length: next(iter(our_loader(n)))) for _ in range(options.rounds))
        print(f"ours alone, first batch of 10**{len(str(length)) - 1}: {best * 1e3:.3f} ms")


def _row(
    name: str,
    figure: Callable[[Callable[[int], Any], int], float],
    length: int,
    num_rounds: int,
    unit: str,
    scale: float,
) -> Comparison:
    return compare(
        f"{name}, 10**{len(str(length)) - 1} samples",
        lambda: figure(ours, length),
        lambda: figure(theirs, length),
        num_rounds=num_rounds,
        unit=unit,
        scale=scale,
    )


if __name__ == "__main__":
    main()
