"""Launcher variables (torchrun's, Slurm's, or none at all) -> one frozen `Environment`. No torch here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import LaunchError


@dataclass(frozen=True)
class Environment:
    """Where this process stands among the others, as its launcher said."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str | None = None  # None: a world of one, no store is needed
    master_port: int | None = None
    launcher: str = "none"  # "torchrun" (its variables, whoever set them), "slurm" or "none"
    run_id: str | None = None
    restart_count: int = 0


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """The `Environment` that the launcher's variables describe; a world of one when there are none.

    Raises:
        LaunchError: a variable is missing, is not a number, or contradicts another one.
    """
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _from_torchrun(variables)
    return Environment()


def _from_torchrun(variables: Mapping[str, str]) -> Environment:
    rank = _integer(variables, "RANK")
    world_size = _integer(variables, "WORLD_SIZE")
    local_rank = _integer(variables, "LOCAL_RANK", default=rank)
    local_world_size = _integer(variables, "LOCAL_WORLD_SIZE", default=world_size)
    if not 0 <= rank < world_size:
        raise LaunchError(f"RANK={rank} is not in 0..WORLD_SIZE-1 (WORLD_SIZE={world_size})")
    if not 0 <= local_rank < local_world_size:
        raise LaunchError(
            f"LOCAL_RANK={local_rank} is not in 0..LOCAL_WORLD_SIZE-1 (LOCAL_WORLD_SIZE={local_world_size})"
        )
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=variables.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_integer(variables, "MASTER_PORT"),
        launcher="torchrun",
        run_id=variables.get("TORCHELASTIC_RUN_ID"),
        restart_count=_integer(variables, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def _integer(variables: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None:
        if default is None:
            raise LaunchError(
                f"{name} is not set although other launcher variables are: start the script with "
                "`samestep run` or torchrun, or unset RANK and WORLD_SIZE for a world of one"
            )
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r} is not a whole number") from None
