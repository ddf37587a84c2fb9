"""The command line, `samestep`. It starts without importing torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import click

import samestep
from samestep.errors import SamestepError

BENCH_MODELS = ("mlp", "transformer", "resnet", "small")

_RUN_EPILOG = """\
\b
Examples:
  samestep run train.py --lr 0.1             one process per GPU, or one on the CPU
  samestep run --nproc 4 train.py            4 processes on this host
  samestep run --nproc 2 -m package.train    a module instead of a script
  samestep run --nproc 2 --max-restarts 3 --log-dir logs train.py

\b
  # on each of two hosts; node01 is one of them:
  samestep run --nnodes 2 --rdzv-endpoint node01:29400 train.py

The script sees torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, ...). Where they are not set yet,
OMP_NUM_THREADS becomes cores / ranks, and MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ let glibc keep
the memory that a step frees.

When a rank fails, all are ended and the traceback of the one that failed first is printed. Exit status: 0;
the exit code of the rank that failed first (1 for an exception, 128 + N for signal N); 75 if all ranks were
asked to end, saved, and raised samestep.Preempted: start the run again; 2 for a command that makes no sense.
"""


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(samestep.__version__, message="samestep %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Data-parallel training in PyTorch: the same step on every process."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command(
    "run",
    epilog=_RUN_EPILOG,
    context_settings={"allow_interspersed_args": False, "max_content_width": 100},
)
@click.option(
    "--nproc",
    default="auto",
    metavar="N|auto|gpu|cpu",
    help="Processes on this host. auto: one per GPU; without a GPU one, which uses all cores. "
    "gpu: one per GPU. cpu: one per core.  [default: auto]",
)
@click.option(
    "--nnodes",
    default="1",
    metavar="MIN[:MAX]",
    help="Hosts that take part. With a range, the run starts with MIN and hosts may come and go.  "
    "[default: 1]",
)
@click.option(
    "--rdzv-endpoint",
    metavar="HOST:PORT",
    help="Where the hosts find each other: one of them, and a free port on it. The same on all.",
)
@click.option("--rdzv-id", metavar="ID", help="The run's name. The same on all hosts.")
@click.option(
    "--max-restarts",
    type=int,
    default=0,
    metavar="N",
    help="How often all ranks are started anew after a failure.  [default: 0]",
)
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Also write each rank's lines to DIR/rank_N/stdout.log and stderr.log, after what is there.",
)
@click.option(
    "--grace",
    "grace_s",
    type=float,
    default=30.0,
    metavar="SECONDS",
    help="How long ranks may take to save after SIGTERM (samestep.Preemption) before they are killed.  "
    "[default: 30]",
)
@click.option("-m", "is_module", is_flag=True, help="The script is a module's name, as for python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def run_command(
    nproc: str,
    nnodes: str,
    rdzv_endpoint: str | None,
    rdzv_id: str | None,
    max_restarts: int,
    log_dir: Path | None,
    grace_s: float,
    is_module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> NoReturn:
    """Run SCRIPT in several processes, the ranks of one world. What follows SCRIPT is passed on to it."""
    from samestep.launch.options import RunOptions, check_target, parse_endpoint, parse_nnodes, resolve_nproc
    from samestep.launch.run import run

    fewest, most = parse_nnodes(nnodes)
    if rdzv_endpoint is not None:
        parse_endpoint(rdzv_endpoint)
    check_target(script, is_module=is_module)
    options = RunOptions(
        target=script,
        arguments=arguments,
        is_module=is_module,
        num_ranks=resolve_nproc(nproc),
        min_hosts=fewest,
        max_hosts=most,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_id=rdzv_id,
        max_restarts=max_restarts,
        log_dir=log_dir,
        grace_s=grace_s,
    )
    sys.exit(run(options))


_BENCH_EPILOG = """\
\b
Examples:
  samestep bench                                        2 ranks on the CPU, or one per GPU
  samestep bench --nproc 4 --backend gloo --model mlp
  samestep bench --model train.py:make_step             a model of your own

\b
  # train.py
  def make_step(device):
      inputs, labels = next(iter(loader))
      model = Net().to(device)
      return model, lambda model: loss_fn(model(inputs.to(device)), labels.to(device))
"""


@cli.command("bench", epilog=_BENCH_EPILOG, context_settings={"max_content_width": 100})
@click.option(
    "--nproc",
    default="auto",
    metavar="N|auto|gpu|cpu",
    help="Ranks, all on this host. auto: one per GPU; without a GPU 2.  [default: auto]",
)
@click.option("--backend", metavar="NAME", help="nccl, gloo, shm, ...  [default: what World() chooses]")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="mlp, transformer, resnet, small (1,000 small parameters) or FILE.py:FUNCTION; may be repeated.  "
    "[default: the first three]",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=7,
    metavar="N",
    help="How often all variants take turns.  [default: 7]",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write all figures there.")
def bench_command(
    nproc: str, backend: str | None, models: tuple[str, ...], rounds: int, json_path: Path | None
) -> NoReturn:
    """Time a training step here: ours, torch's DDP, and replicas that do not synchronise, in turns.

    The last is the limit: what no way of synchronising can beat. The figure to read is how far a step is
    from it. Keep the machine idle meanwhile.
    """
    from samestep.bench import own_model
    from samestep.launch.options import RunOptions, resolve_nproc
    from samestep.launch.run import run

    for model in models:
        if model not in BENCH_MODELS:
            own_model.check(model)
    if json_path is not None and not json_path.resolve().parent.is_dir():
        raise click.UsageError(f"--json {json_path}: there is no such folder")
    num_ranks = resolve_nproc(nproc)
    arguments = [f"--model={model}" for model in models or BENCH_MODELS[:3]] + [f"--rounds={rounds}"]
    arguments += [f"--backend={backend}"] if backend else []
    arguments += [f"--json={json_path}"] if json_path else []
    sys.exit(
        run(
            RunOptions(
                target="samestep.bench",
                arguments=tuple(arguments),
                is_module=True,
                num_ranks=2 if nproc == "auto" and num_ranks == 1 else num_ranks,
            )
        )
    )


_EXIT_STATUS = "Exit status: 0 yes, 1 no, 2 where there is nothing to look at."
_CHECKPOINT = click.Path(path_type=Path)
_FORMAT = click.option(
    "--format",
    "kind",
    type=click.Choice(["pt", "safetensors", "dcp"]),
    help="pt: torch.save, for torch.load(weights_only=True). dcp: torch.distributed.checkpoint, a "
    "directory.  [default: by the name's suffix]",
)


@cli.command("verify", epilog=_EXIT_STATUS)
@click.argument("one", metavar="A", type=_CHECKPOINT)
@click.argument("other", metavar="B", type=_CHECKPOINT)
def verify_command(one: Path, other: Path) -> NoReturn:
    """Compare the checkpoints A and B bit by bit; name the first tensor, index and values that differ.

    Each is a checkpoint, or a directory of checkpoints, whose latest is meant. Step, models, optimizers and
    all other entries are compared; random streams and the number of ranks that saved are not.
    """
    from samestep.checkpoint.report import print_comparison

    sys.exit(0 if print_comparison(one, other) else 1)


@cli.group("checkpoint")
def checkpoint_group() -> None:
    """Look into checkpoints, check them, and convert them."""


@checkpoint_group.command("show")
@click.argument("path", type=_CHECKPOINT)
def show_command(path: Path) -> None:
    """List the tensors of the checkpoint PATH, or of the latest one in it: name, dtype, shape, bytes."""
    from samestep.checkpoint.report import print_tensors

    print_tensors(path)


@checkpoint_group.command("verify", epilog=_EXIT_STATUS)
@click.argument("path", type=_CHECKPOINT)
def verify_digests_command(path: Path) -> NoReturn:
    """Check the digests of the checkpoint PATH, or of the latest one in it, and that it can be loaded."""
    from samestep.checkpoint.report import print_verdict

    sys.exit(0 if print_verdict(path) else 1)


@checkpoint_group.command("export")
@click.argument("path", type=_CHECKPOINT)
@click.argument("target", type=_CHECKPOINT)
@_FORMAT
@click.option(
    "--entry", default="model", metavar="NAME", help="What a safetensors file holds.  [default: model]"
)
def export_command(path: Path, target: Path, kind: str | None, entry: str) -> None:
    """Write the checkpoint PATH, or the latest one in it, to TARGET in another format."""
    from samestep.checkpoint.convert import export_checkpoint

    export_checkpoint(path, target, kind=kind, entry=entry)
    click.echo(target)


@checkpoint_group.command("import")
@click.argument("source", type=_CHECKPOINT)
@click.argument("directory", type=_CHECKPOINT)
@_FORMAT
@click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="N",
    help='The number of optimizer steps done.  [default: what SOURCE has under "step", else 0]',
)
def import_command(source: Path, directory: Path, kind: str | None, step: int | None) -> None:
    """Make a checkpoint in DIRECTORY of SOURCE, which is in another format. No code in it is run."""
    from samestep.checkpoint.convert import import_checkpoint

    click.echo(import_checkpoint(source, directory, kind=kind, step=step))


def main() -> NoReturn:
    """The entry point: bad input gets one line on standard error and exit status 2."""
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        message = " ".join(error.format_message().split())
        hint = (
            f" (see {error.ctx.command_path} --help)"
            if isinstance(error, click.UsageError) and error.ctx
            else ""
        )
        _refuse(f"{message}{hint}")
    except SamestepError as error:
        _refuse(str(error))
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    sys.exit(0)


def _refuse(message: str) -> NoReturn:
    click.echo(f"samestep: {message}", err=True)
    sys.exit(2)
