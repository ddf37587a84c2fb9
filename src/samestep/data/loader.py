"""`DataLoader`: steps, and in each the micro-batches of the virtual ranks that this process plays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader as TorchLoader

from samestep.data import permutation, setup
from samestep.data.keyed import key_of
from samestep.data.plan import LoaderMode
from samestep.data.requests import RequestQueue
from samestep.data.sampler import whole
from samestep.data.steps import Delivery, Pass, Standing
from samestep.data.stream import Arrived, StreamCollate, StreamReader, StreamState
from samestep.errors import DataError
from samestep.random_streams import KeptStreams

if TYPE_CHECKING:
    from samestep.world import World

__all__ = ["DataLoader"]

_STATE_VERSION = 1


class DataLoader:
    """The steps of a run, whoever plays it: the micro-batches of this process's virtual ranks.

        loader = samestep.DataLoader(dataset, batch_size=16, shuffle=True, num_workers=4)
        for step in loader:             # one optimizer step
            for x, y in step:           # one micro-batch per virtual rank this process plays
                loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    *Steps or batches.* In a `World(virtual_size=V)`, and wherever `accumulation` is given, the loader yields
    steps, even if each has one micro-batch only: the form of the loop depends on the script, never on the
    number of processes. Else each step has one micro-batch per process, and the loader yields that: `for x, y
    in loader`, as with torch's.

    *Sizes.* `batch_size` samples are one micro-batch: what one forward sees. Each of the V virtual ranks has
    `accumulation` of them per step, so the global batch is V * accumulation * batch_size, whatever the number
    of processes.

    *The order* of an epoch is a function of (seed, epoch) alone, and the samples of virtual rank v in a step
    of that, V and the sizes. Sample p of the order goes to virtual rank p % V, as `DistributedSampler` does.

    *The last step* of an epoch may be short, and `mode` says what then happens. "exact" (default): every
    sample is seen once; virtual ranks whose share is smaller, by one sample, count for less, so that the
    gradient is that of the global batch's mean (`DistributedDataParallel` sees to it, with its default
    `reduction="mean"`). If fewer samples are left than there are virtual ranks, those without one get a
    sample of the step once more, with weight 0: all run the same number of forwards. "pad": all shares are
    equal, because fewer than V samples of the step are repeated. "drop" (`drop_last=True`): the short step is
    left out. "evaluate": no steps; each process gets its share of the batches of consecutive samples, each
    sample once, maybe one batch less than the others; `samestep.gather(results, of=loader)` puts results in
    the data set's order.

    *Random numbers.* Whatever `dataset[i]` and `collate_fn` draw from torch, numpy or `random` depends on
    (seed, epoch, sample) and on nothing else: not on workers, not on processes.

    *Epochs* advance by themselves, as those of `DistributedSampler`; `set_epoch` says which comes next.

    *Resuming.* `state_dict()` says where the loop stands, not how far workers have read ahead. Loaded on any
    number of processes, the next pass hands out what is left of the epoch. Call it between two steps.

    Iterable data sets, samplers and batch samplers are shared out by position, with narrower promises: see
    docs/data.md.

    Ranks: each process makes its own, with equal arguments. Nothing here communicates.

    Args:
        dataset: as for torch: with `__getitem__` and `__len__`, or iterable.
        batch_size: samples of a micro-batch; None: what the data set holds are batches already.
        shuffle: another order in each epoch; False: the data set's.
        sampler: an iterable of indices, which names the samples of all processes together, such as
            `WeightedSampler`; not a `DistributedSampler`.
        batch_sampler: an iterable of lists of indices, each one micro-batch, of all processes together.
        drop_last: torch's name for `mode="drop"`.
        mode: "exact", "pad", "drop" or "evaluate".
        accumulation: micro-batches of each virtual rank per step.
        seed: of order and random numbers; default: the world's, else 0.
        sample_streams: False: no random streams for samples, which saves 10 us per sample. Default: on,
            unless the data set is plain tensors or lists, which draw nothing.
        world: the `World` that trains; default: the one that there is.
        process_group: its process group, instead of `world`.
        torch_options: `num_workers`, `collate_fn`, `pin_memory`, `prefetch_factor`, `persistent_workers`,
            `worker_init_fn`, `multiprocessing_context`, `timeout`, ...: all that torch's loader takes, but
            `in_order=False`.

    Raises:
        DataError: the data set is empty or has no length; arguments contradict each other.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        *,
        drop_last: bool = False,
        mode: LoaderMode | None = None,
        accumulation: int | None = None,
        seed: int | None = None,
        sample_streams: bool | None = None,
        world: World | None = None,
        process_group: dist.ProcessGroup | None = None,
        **torch_options: Any,
    ) -> None:
        if not torch_options.pop("in_order", True):
            raise DataError("in_order=False: batches must come in order to reach their virtual ranks")
        if batch_sampler is not None and batch_size not in (1, None):
            raise DataError("batch_size and batch_sampler each say what a batch is: give one of them")
        self.dataset = dataset
        self.batch_size = None if batch_sampler is not None else batch_size
        self._place = (world, process_group)
        self.virtual = setup.players(world, process_group)
        self.seed = whole((self.virtual.seed or 0) if seed is None else seed, "seed")
        self.shape = setup.shape_of(self.virtual, self.batch_size, accumulation, mode, drop_last)
        self.is_evaluating = self.shape.mode == "evaluate"
        self.yields_steps = not self.is_evaluating and (self.virtual.is_fixed or accumulation is not None)
        here = self.virtual.rank if self.is_evaluating else None
        self._block = range(*self.virtual.block) if here is None else range(here, here + 1)
        self._source = setup.source_of(
            dataset, shuffle, sampler, batch_sampler, self.shape, self._block, self.seed
        )
        self._is_stream = setup.is_stream(dataset)
        if sample_streams is None:
            sample_streams = torch_options.get("collate_fn") is not None or not setup.draws_nothing(dataset)
        self._sample_streams = sample_streams
        self._in_process = not torch_options.get("num_workers")
        self._queue = RequestQueue(self._source, streams=sample_streams, in_process=self._in_process)
        ready_made = batch_size is None and batch_sampler is None
        self._collate = setup.collate_of(torch_options.pop("collate_fn", None), ready_made=ready_made)
        self._own_generator = torch_options.get("generator") is None
        if self._own_generator:  # of the workers' first seeds: not drawn from the script's stream
            torch_options["generator"] = torch.Generator()
        self._torch_options = torch_options
        self._torch_loader = self._make_torch_loader(None)
        self._current: Standing | None = None
        self._next_epoch = 0
        self._next_start = 0
        self._next_stream: Any = None
        self._length = setup.length_of(dataset)

    # The loop

    def __iter__(self) -> Iterator[Any]:
        return self._evaluation() if self.is_evaluating else self._training()

    def _training(self) -> Iterator[Any]:
        here = self._begin()
        while (step := here.next_step()) is not None:
            if self.yields_steps:
                yield step
            else:
                yield from step
            step.leave()
            if self._current is not here.standing:
                raise DataError(
                    f"a pass over epoch {here.standing.epoch} goes on after another one has begun, or after "
                    "set_epoch() or load_state_dict(): leave a pass before you begin another"
                )

    def _begin(self) -> Pass:
        if self._current is not None and self._current.left is not None:
            raise DataError(
                f"{self._current.left}, and now another pass begins: go through all "
                "batches of a step, or start over with set_epoch() or load_state_dict()"
            )
        self._check_length()
        setup.check_players(self.virtual, *self._place)
        epoch, start = self._next_epoch, self._next_start
        self._current = Standing(epoch, start, self._next_stream)
        self._next_epoch, self._next_start, self._next_stream = epoch + 1, 0, None
        deliveries = self._deliveries(epoch, start)
        return Pass(self._current, deliveries, self.virtual, full_step=self.shape.num_units)

    def _evaluation(self) -> Iterator[Any]:
        self._check_length()
        for batch, _, _ in self._deliveries(0, 0):
            yield batch

    def _deliveries(self, epoch: int, start: int) -> Iterator[Delivery]:
        """What torch's loader delivers: this process's micro-batches of the epoch from unit `start` on."""
        notes = self._queue.begin(epoch, start)
        if self._own_generator:
            self._torch_options["generator"].manual_seed(key_of("loader workers", self.seed, epoch) >> 1)
        arriving = iter(self._torch_loader)
        nothing = object()
        while True:
            with self._streams_kept():
                arrived = next(arriving, nothing)
            if arrived is nothing:
                return
            note = notes.popleft()
            state = None
            if isinstance(arrived, Arrived):
                if arrived.ended:
                    return
                arrived, note, state = arrived.batch, arrived.note, arrived.state
            if note is not None:
                yield arrived, note, state
            del arrived

    def _streams_kept(self) -> contextlib.AbstractContextManager[None]:
        draws_here = self._in_process and (self._sample_streams or self._is_stream)
        return KeptStreams() if draws_here else contextlib.nullcontext()

    def _make_torch_loader(self, resume: StreamState | None) -> TorchLoader[Any]:
        dataset: Any = self.dataset
        collate: Callable[[Any], Any] = self._collate
        if self._is_stream:
            dataset = StreamReader(dataset, self.shape, self._block, self.seed, resume)
            collate = StreamCollate(collate)
        return TorchLoader(
            dataset,
            batch_sampler=self._queue,
            collate_fn=collate,
            **self._torch_options,
        )

    # Where it stands

    @property
    def epoch(self) -> int:
        """The epoch under way; before its first step is taken, the one to come."""
        return self._next_epoch if self._current is None else self._current.epoch

    @property
    def global_batch_size(self) -> int:
        """The samples of a full step on all processes together (batches, if they come ready-made)."""
        return self.shape.num_units

    def __len__(self) -> int:
        """The number of steps of the next pass (or of batches, where it yields these)."""
        length = self._source.length
        if length is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length, and so its loader has none")
        if self.is_evaluating:
            num_batches = -(-length // self.shape.batch_size)
            return len(range(self.virtual.rank, num_batches, self.virtual.num_ranks))
        return self.shape.num_steps(max(0, length - self._next_start))

    def set_epoch(self, epoch: int) -> None:
        """The next pass is of this epoch, from its start.

        The one exception is the epoch of a state that was loaded and not yet iterated over: naming it again,
        as `for epoch in range(loader.epoch, num_epochs): loader.set_epoch(epoch)` does, keeps the position.
        """
        epoch = whole(epoch, "epoch")
        if self._current is not None or epoch != self._next_epoch:
            self._go_to(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands in its data, for `load_state_dict` on any number of processes.

        A step counts when its last micro-batch was taken, so call this after the step, not in its middle.

        Ranks: any; all have equal states after equal steps.

        Raises:
            DataError: the loop is in the middle of a step.
        """
        if self.is_evaluating:
            raise DataError('a loader with mode="evaluate" has no state: each pass over it is a whole one')
        epoch, position, stream = self._next_epoch, self._next_start, self._next_stream
        here = self._current
        if here is not None:
            if here.left is not None:
                raise DataError(f"{here.left}, and has no state there: take it after the step")
            epoch, position, stream = here.epoch, here.position, here.stream_state
            length = self._source.length
            if here.ended or (length is not None and not self.shape.num_steps(max(0, length - position))):
                epoch, position, stream = epoch + 1, 0, None
        return {
            **self._facts(),
            "virtual_size": self.virtual.virtual_size,
            "is_fixed": self.virtual.is_fixed,
            "epoch": epoch,
            "num_consumed": position,
            "stream": stream,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass goes on where the run that saved `state` stood; processes may be more or fewer.

        Raises:
            DataError: `state` is not a loader's, or of another seed, order, data set length or virtual size.
        """
        own = self._facts()
        keys = {*own, "virtual_size", "is_fixed", "epoch", "num_consumed", "stream"}
        if not isinstance(state, Mapping) or not keys >= set(state) or not keys - set(own) <= set(state):
            raise DataError(f"this is not the state of a samestep.DataLoader: {state!r:.80}")
        for key, value in own.items():
            if state.get(key) != value:
                raise DataError(
                    f"the loader's saved state has {_NAMES.get(key, key)} {state.get(key)!r}, this loader "
                    f"{value!r}: they order the data differently; make them equal, or start the epoch anew "
                    "without the state"
                )
        self._check_virtual_size(state)
        epoch = whole(state["epoch"], "epoch")
        position = whole(state["num_consumed"], "num_consumed", least=0)
        length = self._source.length
        if length is not None and position > length:
            raise DataError(f"num_consumed={position} is not in 0..{length}, the data set's length")
        self._go_to(epoch, position, state["stream"])

    def rows_by_rank(self, num_rows: Sequence[int]) -> list[npt.NDArray[np.int64]]:
        """For each process, which samples the first `num_rows[rank]` were that it was handed; for `gather`.

        Raises:
            DataError: a process has more rows than it was handed samples, or this loader is for training.
        """
        size, batch_size = self.virtual.num_ranks, self.batch_size
        if not self.is_evaluating or batch_size is None:
            raise DataError(
                'gather(of=loader) needs a loader with mode="evaluate" and a batch_size: others do not hand '
                "out each sample once, in an order that rows can be put back into"
            )
        if len(num_rows) != size:
            raise DataError(f"{len(num_rows)} ranks gather what a loader dealt to {size}")
        rows = []
        for rank, count in enumerate(num_rows):
            batch, within = np.divmod(np.arange(count, dtype=np.int64), batch_size)
            places = (batch * size + rank) * batch_size + within
            if self._source.length is not None and count and places[-1] >= self._source.length:
                raise DataError(
                    f"rank {rank} gathers {count} rows, more than it was handed samples: gather what one "
                    "pass over the data gave, each sample once"
                )
            rows.append(places)
        return rows

    def __repr__(self) -> str:
        shape = self.shape
        sizes = f"batch_size={self.batch_size}, accumulation={shape.accumulation}, mode={shape.mode!r}"
        return f"DataLoader({type(self.dataset).__name__}, {sizes}, seed={self.seed}, {self.virtual!r})"

    # Inside

    def _go_to(self, epoch: int, position: int, stream: Any = None) -> None:
        """The next pass is of `epoch`, from unit `position`; whatever is under way is forgotten."""
        if self._is_stream and (stream is not None or self._next_stream is not None):
            resume = None if stream is None else StreamState(epoch, position, stream)
            self._torch_loader = self._make_torch_loader(resume)  # new workers, which begin there
        self._next_epoch, self._next_start, self._next_stream = epoch, position, stream
        self._current = None
        self.virtual.leave_step()

    def _facts(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "permutation_version": permutation.VERSION,
            "seed": self.seed,
            **self._source.facts(),
        }

    def _check_length(self) -> None:
        length = setup.length_of(self.dataset)
        if not self._is_stream and self._length is not None and length != self._length:
            raise DataError(
                f"the data set had {self._length} samples when the loader was made and has {length} now: "
                "make a new loader"
            )

    def _check_virtual_size(self, state: Mapping[str, Any]) -> None:
        saved, own = state["virtual_size"], self.virtual.virtual_size
        if saved == own or not (state["is_fixed"] or self.virtual.is_fixed):
            return  # without virtual ranks a run is not the same on other numbers of processes anyway
        now = f"virtual_size={own}" if self.virtual.is_fixed else f"{own} processes and no virtual_size"
        then = f"virtual_size={saved}" if state["is_fixed"] else f"{saved} processes and no virtual_size"
        raise DataError(
            f"the run was saved with {then} and goes on with {now}: its steps would be others. Go on in a "
            f"World(virtual_size={saved})"
        )


# What the facts of a state are called in messages.
_NAMES = {"num_units": "a length of", "order": "the order", "order_seed": "the order's seed"}
