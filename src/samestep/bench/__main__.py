"""What each rank of `samestep bench` does: time the steps; rank 0 shows the table."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from samestep.bench import own_model
from samestep.bench.models import WORKLOADS, Maker
from samestep.bench.timing import make_step, ratios, spread, time_rounds
from samestep.gradients import DistributedDataParallel
from samestep.observe import progress
from samestep.world import World

Wrap = Callable[[nn.Module], nn.Module]

_LIMIT = "unsynchronised"


def _variants(world: World) -> dict[str, Wrap]:
    """How a model is made synchronous, by the name shown; the first one does not."""

    def torchs(group: dist.ProcessGroup) -> Wrap:
        return lambda model: nn.parallel.DistributedDataParallel(model, process_group=group)

    backend = dist.get_backend()
    variants: dict[str, Wrap] = {_LIMIT: lambda model: model}
    if backend == "shm":  # what one would have without samestep
        gloo: Any = dist.new_group(backend="gloo")
        variants["torch DDP, gloo"] = torchs(gloo)
    variants[f"torch DDP, {backend}"] = torchs(world.group)
    variants[f"samestep, {backend}"] = lambda model: DistributedDataParallel(model)
    return variants


def _time_models(
    models: list[str], num_rounds: int, world: World
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Model -> variant -> seconds per step in each round; model -> its title."""
    makers: dict[str, Maker] = {
        name: WORKLOADS[name].make if name in WORKLOADS else own_model.load(name) for name in models
    }
    titles = {name: WORKLOADS[name].title if name in WORKLOADS else name for name in models}
    variants = _variants(world)
    times = {}
    with progress(total=len(models) * num_rounds * len(variants)) as bar:
        for name, maker in makers.items():
            bar.description = titles[name]
            steps = {}
            for variant, wrap in variants.items():
                torch.manual_seed(0)
                model, loss_of = maker(world.device)
                steps[variant] = make_step(wrap(model), loss_of)
            times[name] = time_rounds(steps, num_rounds, world.group, world.device, on_round=bar.advance)
            steps.clear()
    return times, titles


def _table(times: dict[str, dict[str, list[float]]], titles: dict[str, str], world: World) -> Table:
    ranks = f"{world.size} rank(s) ({dist.get_backend()}, {world.device.type})"
    table = Table(
        "model", "variant", "step", "to unsynchronised",
        title="One training step, AdamW: median (min .. max) of the rounds",
        caption=f"{ranks}, {torch.get_num_threads()} thread(s) each, torch {torch.__version__}",
    )  # fmt: skip
    for name, by_variant in times.items():
        for number, (variant, figures) in enumerate(by_variant.items()):
            ratio = "1" if variant == _LIMIT else spread(ratios(by_variant, variant, _LIMIT))
            step_ms = f"{statistics.median(figures) * 1e3:.1f} ms"
            table.add_row("" if number else titles[name], variant, step_ms, ratio)
        table.add_section()
    return table


def _verdict(by_variant: dict[str, list[float]], title: str) -> str:
    ours = statistics.median(ratios(by_variant, list(by_variant)[-1], _LIMIT))
    theirs = statistics.median(ratios(by_variant, list(by_variant)[1], _LIMIT))
    return (
        f"{title}: synchronising adds {max(0.0, ours - 1):.0%} to a step here; "
        f"{list(by_variant)[1]}: {max(0.0, theirs - 1):.0%}."
    )


def _show(times: dict[str, dict[str, list[float]]], titles: dict[str, str], world: World) -> None:
    console = Console()
    console.print(_table(times, titles, world))
    for name, by_variant in times.items():
        console.print(_verdict(by_variant, titles[name]), soft_wrap=True, highlight=False)


def _write(path: Path, times: dict[str, dict[str, list[float]]], world: World) -> None:
    record = {
        "num_ranks": world.size,
        "backend": dist.get_backend(),
        "device": world.device.type,
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "seconds_per_step": times,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Time what the arguments, checked by `samestep bench`, ask for."""
    parser = argparse.ArgumentParser(prog="samestep.bench")
    parser.add_argument("--model", dest="models", action="append", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--backend")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with World(seed=0, backend=options.backend) as world:
        times, titles = _time_models(options.models, options.rounds, world)
        if world.is_main:
            _show(times, titles, world)
            if options.json:
                _write(options.json, times, world)


if __name__ == "__main__":
    main()
