"""Runs the data-parallel tests of torch's own suite over Gloo on CPU, with samestep's classes or torch's.

The exit status is 1 when samestep fails or hangs at a test that torch's own class passes.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch comes: ranks share the cores, a fork wants one thread

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.conformance.ddp_suite.bench import IMPLEMENTATIONS, Bench
from tests.conformance.ddp_suite.page import DOCUMENTED_WORLD_SIZES, PAGE, Results, render
from tests.conformance.ddp_suite.ranks import Outcome
from tests.conformance.ddp_suite.selection import select_tests

_PROGRAM = [sys.executable, "-m", "tests.conformance.ddp_suite"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.ddp_suite", description=__doc__)
    parser.add_argument("--implementation", choices=[*IMPLEMENTATIONS, "both"], default="samestep")
    parser.add_argument("--world-size", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--only", action="append", metavar="TEXT", help="only tests with TEXT in their name")
    parser.add_argument("--verbose", "-v", action="store_true", help="print the logs of what does not pass")
    parser.add_argument("--json", type=Path, help="write the outcomes into this file, too")
    parser.add_argument("--serve", action="store_true", help="run the tests named on stdin, a line each, and "
                        "answer with a line of JSON each")  # fmt: skip
    parser.add_argument("--write-docs", action="store_true", help=f"run all and write {PAGE.name}")
    args = parser.parse_args()
    if args.write_docs:
        return write_docs()
    bench = Bench(args.world_size)
    if args.serve:
        return serve(bench)
    names = [test.name for test in select_tests() if not args.only or any(t in test.name for t in args.only)]
    implementations = IMPLEMENTATIONS if args.implementation == "both" else (args.implementation,)
    results = {name: run_all(bench, names, name, args.verbose) for name in implementations}
    if args.json:
        args.json.write_text(
            json.dumps({i: {n: asdict(o) for n, o in r.items()} for i, r in results.items()})
        )
    if "samestep" not in results:
        return 0
    return 1 if report_regressions(bench, results["samestep"], results.get("torch", {})) else 0


def run_all(bench: Bench, names: list[str], implementation: str, verbose: bool) -> dict[str, Outcome]:
    """Run `names` one after another, a line for each."""
    print(f"{len(names)} tests, {implementation}, {bench.world_size} ranks")
    outcomes: dict[str, Outcome] = {}
    start_s = time.monotonic()
    for name in names:
        outcome = outcomes[name] = bench.run(name, implementation)
        print(f"{outcome.status:4} {outcome.duration_s:5.1f} s  {name}  {outcome.detail[:200]}", flush=True)
        if verbose and outcome.status in ("fail", "hang"):
            print(outcome.log)
    statuses = [outcome.status for outcome in outcomes.values()]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in ("pass", "fail", "hang", "skip"))
    print(f"{implementation}, {bench.world_size} ranks: {counts}; {time.monotonic() - start_s:.0f} s")
    return outcomes


def report_regressions(bench: Bench, ours: dict[str, Outcome], torchs: dict[str, Outcome]) -> list[str]:
    """The tests at which samestep fails or hangs and torch's class, asked now if need be, passes."""
    regressions = []
    for name, outcome in ours.items():
        if outcome.status in ("fail", "hang"):
            reference = torchs.get(name) or bench.run(name, "torch")
            if reference.status == "pass":
                regressions.append(name)
    if regressions:
        print(f"torch's class passes, samestep does not: {len(regressions)}\n  " + "\n  ".join(regressions))
    return regressions


def serve(bench: Bench) -> int:
    """Answer each name on stdin with samestep's outcome and, where that is bad, torch's."""
    for line in sys.stdin:
        name = line.strip()
        outcome = bench.run(name, "samestep")
        answer = {"samestep": asdict(outcome)}
        if outcome.status in ("fail", "hang"):
            answer["torch"] = asdict(bench.run(name, "torch"))
        print(json.dumps(answer), flush=True)
    return 0


def write_docs() -> int:
    """Run everything at every world size, each in a process of its own, and write the page."""
    results: Results = {}
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        for world_size in DOCUMENTED_WORLD_SIZES:
            path = Path(folder) / f"{world_size}.json"
            command = [*_PROGRAM, "--implementation=both", f"--world-size={world_size}", f"--json={path}"]
            status |= subprocess.run(command, check=False).returncode
            for implementation, outcomes in json.loads(path.read_text()).items():
                for name, outcome in outcomes.items():
                    results[implementation, world_size, name] = Outcome(**outcome)
    PAGE.write_text(render(results), encoding="utf-8")
    print(f"wrote {PAGE}")
    return status


if __name__ == "__main__":
    sys.exit(main())
