"""`make sameness`: every run on 1, 2, 3 and 4 processes, over Gloo and "shm": are the bits equal?"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.forkserver import ensure_running

import torch

from samestep import shm
from samestep.testing import PRELOAD

from .runs import changing_digests, digests_of
from .training import NUM_STEPS, Case, cases

_CHANGING = (4, 2, 3, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0 if all that should be equal is, and the negative control is not."""
    parser = argparse.ArgumentParser(prog="python -m tests.sameness", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 3, 4], help="numbers of processes")
    parser.add_argument("--virtual", type=int, nargs="*", default=[4, 8], help="numbers of virtual ranks")
    options = parser.parse_args(arguments)
    # All processes fork from one that has imported what they need.
    mp.get_context("forkserver").set_forkserver_preload(
        [*PRELOAD, "torch._dynamo", "tests.sameness.training"]
    )
    ensure_running()
    todo = list(cases(tuple(options.virtual)))
    backends = ["gloo", "shm"] if shm.is_available() else ["gloo"]
    print(
        f"{len(todo)} runs of {NUM_STEPS} steps, defined by V virtual ranks: is each one the same, to the "
        "last bit of model and optimizer after every step, on W processes?\n"
    )
    columns: list[tuple[str, dict[Case, list[str]]]] = []
    for backend in backends:
        for num_ranks in options.ranks:
            _say(f"{backend}, {num_ranks} processes")
            columns.append((f"{backend} {num_ranks}", digests_of(todo, num_ranks, backend)))
    for backend in backends:
        _say(f"{backend}, {_CHANGING} processes, from checkpoint to checkpoint")
        name = f"{backend} {','.join(map(str, _CHANGING))}"
        columns.append((name, changing_digests(todo, _CHANGING, backend)))
    _say("the negative control")
    control = replace(todo[0], virtual_size=4, deterministic=False)
    plain = digests_of([control, replace(control, deterministic=True)], 4, "gloo")
    differs = plain[control] != plain[replace(control, deterministic=True)]
    _say("")

    width = max(len(str(case)) for case in todo)
    print(f"{'run':<{width}}  {'bits':<8}  " + "  ".join(name for name, _ in columns))
    num_different = 0
    for case in todo:
        expected = columns[0][1][case]
        cells = []
        for name, digests in columns:
            same = digests[case] == expected
            num_different += not same
            cells.append(f"{'same' if same else 'DIFFERS':<{len(name)}}")
        print(f"{case!s:<{width}}  {expected[-1][:8]}  " + "  ".join(cells))
    print(
        f"\nNegative control, gradients all-reduced in Gloo's own order on 4 processes: "
        f"{'other bits, as expected' if differs else 'THE SAME BITS, so this table shows nothing'}."
    )
    threads = f"torch {torch.__version__}, 1 thread per process"
    print(f"{num_different} of {len(columns) * len(todo)} runs differ ({threads}).")
    return int(num_different > 0 or not differs)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
