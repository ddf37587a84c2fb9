"""The life of the process group: init, rank, device, choice of backend, abort, destroy.

`torch.distributed` holds the one default group; the functions here ask it and keep no state of their own,
so that a script may also mix them with torch's.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store

from samestep import at_exit as at_exit  # from here on this process ends cleanly
from samestep import collectives, shm
from samestep.environment import (
    Environment,
    environment_of_arguments,
    is_loopback,
    read_environment,
)
from samestep.errors import WorldError

__all__ = [
    "DEFAULT_TIMEOUT",
    "abort_process_group",
    "barrier",
    "default_group",
    "destroy_process_group",
    "device",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "given_or_default",
    "init_process_group",
    "is_initialized",
    "is_main",
]

DEFAULT_TIMEOUT = timedelta(minutes=10)
_ABORT_PATIENCE_S = 0.5

# The device type that each backend's collectives work on. A composite such as "cpu:gloo,cuda:nccl" and any
# backend not named here train on the accelerator when there is one.
_CPU_BACKENDS = frozenset({"gloo", "mpi", "shm"})


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    **torch_options: Any,
) -> None:
    """The default process group exists and this process's device is the current one.

    Explicit arguments win over the launcher's variables (torchrun's, Slurm's), which win over the default:
    a world of one, which needs no launcher and no port.

    Ranks: all, once, before any collective.

    Args:
        backend: `"nccl"`, `"gloo"`, our own `"shm"` (the CPU ranks of one host, through shared memory) or
            another that torch knows. Default: NCCL where there is an NVIDIA GPU (or the accelerator's own
            backend); without GPUs `"shm"` if all ranks are on one host and it can be used there, else Gloo.
        init_method: a URL for rendezvous, as for torch. Default: the launcher's variables.
        timeout: how long a collective may wait for the other ranks. Default: 10 minutes.
        world_size: number of ranks; needed with `store`.
        rank: this process's rank; needed with `store`.
        store: an existing store, instead of `init_method`.
        torch_options: passed on (`device_id`, `pg_options`, `group_name`, ...).

    Raises:
        WorldError: there is a group already, `rank` and `world_size` contradict the launcher's variables
            or each other, or a local rank has no device of its own.
        LaunchError: the launcher's variables contradict each other.
    """
    if dist.is_initialized():
        raise WorldError(
            "there is a process group already (rank "
            f"{dist.get_rank()} of {dist.get_world_size()}): call destroy_process_group() first, or drop "
            "the second init_process_group() or World()"
        )
    environment = read_environment()
    _check_against_environment(environment, rank, world_size, explicit=store is not None)
    if environment.launcher == "none" and rank >= 0:
        environment = environment_of_arguments(rank, world_size, local_rank=_local_rank_of(rank))
    is_one_host = world_size == 1 or _is_one_host(environment, init_method, store)
    backend = backend or _default_backend(is_one_host)
    if "shm" in backend:
        shm.register()
    target = _device_for(backend, environment)
    if target.type != "cpu":
        torch.accelerator.set_device_index(target)
    if is_one_host:
        # One host: nothing need listen on an outside interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

    place: dict[str, Any] = {"rank": environment.rank, "world_size": environment.world_size}
    if store is not None:
        place["store"] = store
    elif init_method is not None and not init_method.startswith("env://"):
        place["init_method"] = init_method
    elif environment.master_addr is not None:
        place["init_method"] = _master(environment)
    elif environment.world_size == 1:
        place["store"] = HashStore()
    else:
        raise WorldError(
            f"rank {rank} of {world_size} does not know where to meet the others: set MASTER_ADDR and "
            "MASTER_PORT, give init_method or store, or start the script with `samestep run`"
        )
    dist.init_process_group(backend, timeout=timeout or DEFAULT_TIMEOUT, **place, **torch_options)
    if "gloo" in dist.get_backend_config():
        # Gloo's ranks fail if one that they are still connecting to, having nothing to do, has left already.
        collectives.barrier(default_group())


def is_initialized() -> bool:
    """Whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def default_group() -> dist.ProcessGroup:
    """The default process group.

    Raises:
        WorldError: there is none.
    """
    if not is_initialized():
        raise WorldError(
            "there is no process group yet: call samestep.init_process_group(), or do this inside "
            "`with samestep.World():`"
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def given_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """`group`, else the default process group, else None: before there is one, this process is alone."""
    return default_group() if group is None and is_initialized() else group


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank in `group` (default: in the world), 0..size-1; -1 outside of `group`."""
    return default_group().rank() if group is None else dist.get_rank(group)


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks in `group` (default: in the world); -1 outside of `group`."""
    return default_group().size() if group is None else dist.get_world_size(group)


def get_local_rank() -> int:
    """This process's rank among those of its host: the index of its device."""
    return _standing().local_rank


def is_main() -> bool:
    """Whether this is rank 0, the one that logs and saves. True before there is a process group."""
    return not is_initialized() or default_group().rank() == 0


def device() -> torch.device:
    """The one device this rank trains on: its own accelerator, or the CPU with a CPU backend (Gloo)."""
    standing = _standing()
    return _device_for(dist.get_backend_config(), standing)


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Return when every rank of `group` has called it.

    Ranks: all of `group`.
    """
    collectives.barrier(group or default_group())


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """The group (default: all groups) is gone and its resources are free.

    Ranks: all of `group`, after their last collective. After an exception call `abort_process_group`
    instead (`World` does): a rank that waits for one that failed would wait for ever.
    """
    if group is None:
        default_group()
    dist.destroy_process_group(group)


def abort_process_group() -> None:
    """The process group is gone at once, whatever was in flight, and no rank goes on waiting for this one.

    Ranks: any, alone. Collectives in flight on other ranks end with an error.
    """
    if not is_initialized():
        return
    # Gloo's destructor waits for collectives in flight, up to their time-out: do not wait with it.
    aborting = threading.Thread(
        target=dist.distributed_c10d._abort_process_group, name="samestep-abort", daemon=True
    )
    aborting.start()
    aborting.join(_ABORT_PATIENCE_S)


def _local_rank_of(rank: int) -> int:
    """Where no launcher says it: ranks fill one host's accelerators after the other's."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return rank if accelerator is None else rank % torch.accelerator.device_count()


def _standing() -> Environment:
    """Where this process stands, once there is a group."""
    environment = read_environment()
    group = default_group()
    if environment.launcher != "none" or group.size() == 1:
        return environment
    return replace(environment, rank=group.rank(), local_rank=_local_rank_of(group.rank()))


def _master(environment: Environment) -> str:
    """What torch is told of the place where ranks meet.

    torchrun may have made the store already, which torch learns from more variables: it reads them itself.
    """
    if environment.launcher == "torchrun":
        return "env://"
    host = f"[{environment.master_addr}]" if ":" in str(environment.master_addr) else environment.master_addr
    return f"tcp://{host}:{environment.master_port}"


def _is_one_host(environment: Environment, init_method: str | None, store: Store | None) -> bool:
    """Whether all ranks are known to be on this host; every rank finds the same."""
    if environment.launcher in ("torchrun", "slurm"):
        return environment.one_host
    if init_method is not None and not init_method.startswith("env://"):
        return is_loopback(urlsplit(init_method).hostname or "")
    return store is None and environment.one_host


def _default_backend(is_one_host: bool) -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        return dist.get_default_backend_for_device(accelerator)
    return "shm" if is_one_host and shm.is_available() else "gloo"


def _device_for(backend: str, environment: Environment) -> torch.device:
    """The device of `environment.local_rank`; `backend` is a name or a list such as "cpu:gloo,cuda:nccl"."""
    names = {part.partition(":")[2] or part for part in backend.split(",")}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if "nccl" in names and (accelerator is None or accelerator.type != "cuda"):
        raise WorldError(
            'backend="nccl" needs an NVIDIA GPU, and there is none here: drop the argument (samestep then '
            'chooses what fits), or train on the CPU with backend="gloo"'
        )
    if accelerator is None or names <= _CPU_BACKENDS:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if environment.local_rank >= count:
        raise WorldError(
            f"local rank {environment.local_rank} has no {accelerator.type} device of its own: this host "
            f"has {count}. Start fewer processes (`samestep run --nproc gpu`), or train on the CPU with "
            'backend="gloo"'
        )
    return torch.device(accelerator.type, environment.local_rank)


def _check_against_environment(
    environment: Environment, rank: int, world_size: int, *, explicit: bool
) -> None:
    if (rank >= 0) != (world_size >= 0):
        raise WorldError(
            f"rank={rank} and world_size={world_size}: give both of them, or neither and let the launcher"
        )
    if explicit and rank < 0:
        raise WorldError("a store alone does not say who is who: give rank and world_size with it")
    if rank >= 0 and not rank < world_size:
        raise WorldError(f"rank={rank} is not in 0..{world_size - 1} (world_size={world_size})")
    launched = environment.launcher != "none"
    if launched and rank >= 0 and (rank, world_size) != (environment.rank, environment.world_size):
        raise WorldError(
            f"rank={rank}, world_size={world_size} were asked for, but the launcher's variables say rank "
            f"{environment.rank} of {environment.world_size}: drop the arguments, or start the script "
            "without a launcher"
        )
