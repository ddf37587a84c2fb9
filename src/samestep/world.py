"""The life of a process group: init, rank, device, choice of backend, abort, destroy.

`torch.distributed` holds the one default group; the functions here ask it and keep no state of their own,
so that a script may also mix them with torch's. `World` is the object that owns the group for the length
of a `with` block.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store

from samestep import arithmetic, collectives, shm
from samestep import at_exit as at_exit  # from here on this process ends cleanly
from samestep.environment import (
    Environment,
    environment_of_arguments,
    is_loopback,
    num_usable_cores,
    read_environment,
)
from samestep.errors import Preempted, WorldError
from samestep.gathering import SharesRows
from samestep.gathering import gather as _gather
from samestep.reduction import TreeSum, mean_over_virtual_ranks
from samestep.virtual import VirtualRanks, virtual_ranks

__all__ = [
    "DEFAULT_TIMEOUT",
    "World",
    "abort_process_group",
    "barrier",
    "default_group",
    "destroy_process_group",
    "device",
    "gather",
    "get_local_rank",
    "get_rank",
    "get_world_size",
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


def gather(
    value: Any,
    *,
    of: SharesRows | None = None,
    dst: int | None = None,
    pad: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """The rows of `value` of all ranks, in the order of the data set: what a metric needs.

        scores, labels = [], []
        for x, y in loader:  # each sample once, on some rank
            scores.append(model(x))
            labels.append(y)
        scores, labels = samestep.gather((scores, labels), of=loader)

    `value` is a tensor or array with one row per sample, a list of such for one batch after the other, a
    number (one row), or dicts and tuples of these, nested as you like. Ranks may have different numbers of
    rows, or none: a rank that ran no batch hands in empty lists. What comes back has the same structure, each
    list being one tensor (an array where there were arrays), on the device of this rank's own rows.

    Ranks: all of `group`, with the same structure, dtypes and shapes of rows.

    Args:
        value: this rank's results, in the order in which it was handed the samples.
        of: the `DistributedSampler` or `DataLoader` that handed them out. Rows are then in the data set's
            order, and a sample that padding repeated is there once. Default: rank after rank.
        dst: only this rank gets the result, the others None. Default: all do.
        pad: where rows differ in shape (sentences of different lengths), fill them up with this value.
        group: the ranks; default: the world.

    Raises:
        DataError: on all ranks alike: something cannot be gathered, the ranks' structures, dtypes or shapes
            differ, or there are more rows than samples; the message says where.
    """
    return _gather(value, group or default_group(), of=of, dst=dst, pad=pad)


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


class World:
    """A process group for the length of a `with` block: destroyed on success, aborted on an exception.

        with samestep.World(seed=0) as world:
            model = samestep.DistributedDataParallel(Net().to(world.device))
            ...

    On entry: the group exists, this rank's device is current, and torch, numpy and `random` are seeded
    with `seed`, equally on all ranks, so that a model or a split of the data drawn now is the same
    everywhere. Call `seed_ranks()` after that to give each rank random numbers of its own.

    With `virtual_size=V` the run is defined by V virtual ranks and the seed, and any number of processes up
    to V plays it: after every step parameters, buffers and optimizer state are the same bits, whatever that
    number (docs/sameness.md says what else must be equal). Then take batches from `samestep.data`'s loader,
    which plays this process's virtual ranks in turn:

        for step in loader:
            for batch in step:
                loss_fn(model(batch.x), batch.y).backward()
            optimizer.step()
            optimizer.zero_grad()

    Ranks: all enter; on success all leave.

    Args:
        seed: of the random streams; None leaves them alone.
        backend: as for `init_process_group`.
        timeout: how long a collective may wait for other ranks.
        virtual_size: V; None: one virtual rank per process, and results depend on their number.
        num_threads: intra-op threads of each process inside of the block, on which bits depend. Default: what
            the launcher or `OMP_NUM_THREADS` says; with `virtual_size` the host's cores / V (at least 1),
            which does not change with the number of processes.
        deterministic_algorithms: inside of the block torch uses deterministic kernels alone, and raises where
            there is none (`torch.use_deterministic_algorithms`). GPUs need it for equal bits, CPUs do not.

    Raises:
        WorldError: there are more processes than virtual ranks, or virtual ranks without a seed.
    """

    def __init__(
        self,
        *,
        seed: int | None = 0,
        backend: str | None = None,
        timeout: timedelta | None = None,
        virtual_size: int | None = None,
        num_threads: int | None = None,
        deterministic_algorithms: bool = False,
    ) -> None:
        if seed is not None and seed < 0:
            raise WorldError(f"seed={seed} is negative: seeds are whole numbers from 0")
        if virtual_size is not None and virtual_size < 1:
            raise WorldError(f"virtual_size={virtual_size}: a run has at least 1 virtual rank")
        if virtual_size is not None and seed is None:
            raise WorldError(
                f"virtual_size={virtual_size} needs a seed: the virtual ranks' random streams come from it"
            )
        if num_threads is not None and num_threads < 1:
            raise WorldError(f"num_threads={num_threads}: a process has at least 1 thread")
        if num_threads is None and virtual_size is not None:
            num_threads = max(1, num_usable_cores() // virtual_size)
        self.seed = seed
        self.num_threads = num_threads
        self.deterministic_algorithms = deterministic_algorithms
        self._arithmetic: AbstractContextManager[None] | None = None
        self.virtual_size = virtual_size
        self._tree: tuple[VirtualRanks, TreeSum] | None = None
        self._backend = backend
        self._timeout = timeout

    def __enter__(self) -> World:
        init_process_group(self._backend, timeout=self._timeout)
        try:
            virtual = VirtualRanks(
                self.rank, self.size, virtual_size=self.virtual_size, seed=self.seed, device=self.device
            )
        except WorldError:  # on all ranks alike
            destroy_process_group()
            raise
        virtual_ranks(self.group, attach=virtual)
        self._arithmetic = arithmetic.set_up(
            self.num_threads, deterministic_algorithms=self.deterministic_algorithms
        )
        self._arithmetic.__enter__()
        if self.seed is not None:
            _seed_everything(np.random.SeedSequence(self.seed))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._arithmetic is not None:
            self._arithmetic.__exit__(None, None, None)
            self._arithmetic = None
        if not is_initialized():
            return
        if kind is None or isinstance(error, Preempted) or (isinstance(error, SystemExit) and not error.code):
            destroy_process_group()
        else:
            abort_process_group()

    def __repr__(self) -> str:
        if not is_initialized():
            return f"World(seed={self.seed}, not entered)"
        return f"World(rank={self.rank}, size={self.size}, device='{self.device}', seed={self.seed})"

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        return default_group()

    @property
    def rank(self) -> int:
        """This process's rank, 0..size-1."""
        return self.group.rank()

    @property
    def local_rank(self) -> int:
        """This process's rank among those of its host."""
        return get_local_rank()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.group.size()

    @property
    def virtual(self) -> VirtualRanks:
        """The virtual ranks, and which of them this process plays."""
        return virtual_ranks(self.group)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The device this rank trains on."""
        return device()

    def barrier(self) -> None:
        """Return when every rank has called it.

        Ranks: all.
        """
        barrier()

    def gather(
        self,
        value: Any,
        *,
        of: SharesRows | None = None,
        dst: int | None = None,
        pad: float | None = None,
    ) -> Any:
        """As `samestep.gather`.

        Ranks: all.
        """
        return gather(value, of=of, dst=dst, pad=pad)

    def mean(
        self,
        values: torch.Tensor | float | Sequence[torch.Tensor | float],
        weights: Sequence[float] | None = None,
    ) -> torch.Tensor:
        """The mean, over all virtual ranks, of what each has computed: a loss, an accuracy.

            losses = []
            for batch in step:
                ...
                losses.append(loss)
            print(world.mean(losses))

        It is added in float64 along the tree: the same bits on any number of processes.

        Ranks: all, with values of equal shapes.

        Args:
            values: one per micro-batch of this process's virtual ranks, in the order of their turns; or a
                single one.
            weights: what each counts for, such as its number of samples. Default: all equal.

        Raises:
            WorldError: there are not equally many values for each virtual rank, or all weights are zero.
        """
        virtual = self.virtual
        if self._tree is None or self._tree[0] is not virtual:
            self._tree = virtual, TreeSum(self.group, virtual)
        return mean_over_virtual_ranks(self._tree[1], virtual.block, values, weights)

    def seed_ranks(self) -> None:
        """From here on each rank draws random numbers (dropout, augmentation) of its own.

        Call it once the model and the splits of the data have been drawn.

        Raises:
            WorldError: the world has no seed to derive them from.
        """
        if self.seed is None:
            raise WorldError("World(seed=None) has no seed to derive the ranks' from: give it one")
        _seed_everything(np.random.SeedSequence(self.seed, spawn_key=(self.rank,)))


def _seed_everything(sequence: np.random.SeedSequence) -> None:
    words = sequence.generate_state(3, dtype=np.uint64)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]) % 2**32)
    torch.manual_seed(int(words[2]) >> 1)  # torch's seeds are signed


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
