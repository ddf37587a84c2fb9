"""Launcher variables (torchrun's, Slurm's, or none at all) -> one frozen `Environment`. No torch here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import LaunchError

# Steps from here on are Slurm's own (batch script, salloc's shell, ...), not started by srun for tasks.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0


@dataclass(frozen=True)
class Environment:
    """Where this process stands among the others, as its launcher said."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str | None = None  # None: a world of one, no store is needed
    master_port: int | None = None
    one_host: bool = True  # all ranks are known to be on this host
    # "torchrun" (its variables, whoever set them), "slurm", "arguments" (of init_process_group) or "none"
    launcher: str = "none"
    run_id: str | None = None
    restart_count: int = 0


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """The `Environment` that the launcher's variables describe; a world of one when there are none.

    torchrun's variables, which `samestep run` sets too, win over Slurm's: the launcher may itself be a task.

    Raises:
        LaunchError: a variable is missing, is not a number, or contradicts another one.
    """
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _from_torchrun(variables)
    if _is_slurm_step(variables):
        return _from_slurm(variables)
    return Environment()


def environment_of_arguments(
    rank: int, world_size: int, *, local_rank: int, variables: Mapping[str, str] = os.environ
) -> Environment:
    """The `Environment` of a process that only its script numbers (`torch.multiprocessing.spawn`).

    Raises:
        LaunchError: MASTER_ADDR is set without a MASTER_PORT.
    """
    master_addr = variables.get("MASTER_ADDR")
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=world_size,
        one_host=world_size == 1 or (master_addr is not None and is_loopback(master_addr)),
        master_addr=master_addr,
        master_port=None if master_addr is None else _integer(variables, "MASTER_PORT"),
        launcher="arguments",
    )


def is_loopback(host: str) -> bool:
    """Whether `host` names the host that says so."""
    return host in ("localhost", "::1", "[::1]") or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host) is not None


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
    master_addr = variables.get("MASTER_ADDR", "127.0.0.1")
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        # Without LOCAL_WORLD_SIZE nobody said how many are here; who meets at a host's own address is.
        one_host=local_world_size == world_size
        and ("LOCAL_WORLD_SIZE" in variables or is_loopback(master_addr)),
        master_addr=master_addr,
        master_port=_integer(variables, "MASTER_PORT"),
        launcher="torchrun",
        run_id=variables.get("TORCHELASTIC_RUN_ID"),
        restart_count=_integer(variables, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def _is_slurm_step(variables: Mapping[str, str]) -> bool:
    """Whether `srun` started this process. A shell of sbatch or salloc is no task of a step: a script run
    there by hand is alone and must not wait for others."""
    if "SLURM_STEP_ID" not in variables or "SLURM_PROCID" not in variables:
        return False
    return _integer(variables, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP


def _from_slurm(variables: Mapping[str, str]) -> Environment:
    rank = _integer(variables, "SLURM_PROCID")
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    world_size = _integer(variables, size_name, default=1)
    if not 0 <= rank < world_size:
        raise LaunchError(f"SLURM_PROCID={rank} is not in 0..{size_name}-1 ({size_name}={world_size})")
    job_id = variables.get("SLURM_JOB_ID", "0")
    if world_size == 1:
        return Environment(run_id=job_id)
    local_rank = _integer(variables, "SLURM_LOCALID")
    local_world_size = _tasks_on_this_node(variables, world_size)
    if not 0 <= local_rank < local_world_size:
        raise LaunchError(
            f"SLURM_LOCALID={local_rank} does not fit the {local_world_size} task(s) that Slurm's variables "
            "count on this node"
        )
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        one_host=local_world_size == world_size,
        master_addr=variables.get("MASTER_ADDR") or _slurm_master(variables, local_world_size == world_size),
        master_port=_integer(variables, "MASTER_PORT", default=_slurm_port(variables)),
        launcher="slurm",
        run_id=job_id,
        restart_count=_integer(variables, "SLURM_RESTART_COUNT", default=0),
    )


def _tasks_on_this_node(variables: Mapping[str, str], world_size: int) -> int:
    name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in variables else "SLURM_TASKS_PER_NODE"
    if name not in variables:
        if _integer(variables, "SLURM_STEP_NUM_NODES", default=1) == 1:
            return world_size
        raise LaunchError(f"{name} is not set: this does not look like a task that srun started")
    counts = expand_task_counts(variables[name])
    node = _integer(variables, "SLURM_NODEID", default=0)
    if not 0 <= node < len(counts):
        raise LaunchError(
            f"SLURM_NODEID={node} is not among the {len(counts)} node(s) of {name}={variables[name]}"
        )
    return counts[node]


def _slurm_master(variables: Mapping[str, str], is_one_node: bool) -> str:
    if is_one_node:
        return "127.0.0.1"
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if variables.get(name):
            return first_host(variables[name])
    raise LaunchError("SLURM_STEP_NODELIST is not set: set MASTER_ADDR to the host of rank 0")


def _slurm_port(variables: Mapping[str, str]) -> int:
    """A port that all tasks of a step derive alike, and other jobs' steps on the same host hardly do.

    It is below the ports that systems hand out by themselves (from 32768 on Linux).
    """
    job_id = _integer(variables, "SLURM_JOB_ID", default=0)
    step_id = _integer(variables, "SLURM_STEP_ID", default=0)
    return 12000 + (job_id * 31 + step_id) % 16000


def expand_task_counts(text: str) -> list[int]:
    """The number of tasks on each node: `2(x3),1` is [2, 2, 2, 1].

    Raises:
        LaunchError: it is not written like that.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,7})\))?", part.strip())
        if match is None:
            raise LaunchError(f"SLURM_TASKS_PER_NODE={text!r} is not a list of counts such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first host of Slurm's list: `node[03-05,9],login1` gives `node03`.

    Raises:
        LaunchError: it is not a list of hosts.
    """
    match = re.match(r"[^,\[\]]*(?:\[[^\[\]]*\][^,\[\]]*)*", nodes.strip())
    text = match[0] if match else ""
    host = re.sub(r"\[([^\[\],-]*)[^\[\]]*\]", r"\1", text)
    if not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        raise LaunchError(
            f"SLURM_STEP_NODELIST={nodes!r} names no host: set MASTER_ADDR to the host of rank 0"
        )
    return host


def _integer(variables: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None:
        if default is None:
            raise LaunchError(
                f"{name} is not set although other launcher variables are: start the script with "
                "`samestep run` or torchrun, set it too, or unset them all for a world of one"
            )
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r} is not a whole number") from None


def num_usable_cores() -> int:
    """The number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
