"""`World`: the process group, the random streams and the virtual ranks of a run, for a `with` block."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from samestep import arithmetic
from samestep.environment import num_usable_cores
from samestep.errors import Preempted, WorldError
from samestep.gathering import SharesRows
from samestep.gathering import gather as _gather
from samestep.process_group import (
    abort_process_group,
    barrier,
    default_group,
    destroy_process_group,
    device,
    get_local_rank,
    init_process_group,
    is_initialized,
)
from samestep.random_streams import seed_streams
from samestep.reduction import TreeSum, mean_over_virtual_ranks
from samestep.virtual import VirtualRanks, virtual_ranks

__all__ = ["World", "gather"]


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
            seed_streams(np.random.SeedSequence(self.seed))
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
        seed_streams(np.random.SeedSequence(self.seed, spawn_key=(self.rank,)))
