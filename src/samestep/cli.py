"""The command line, `samestep`. It starts without importing torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import click

import samestep
from samestep.errors import SamestepError

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
the exit code of the rank that failed first (1 for an exception, 128 + N for signal N); 2 for a command that
makes no sense.
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
    )
    sys.exit(run(options))


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
