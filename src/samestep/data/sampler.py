"""`DistributedSampler`: each rank's share of every epoch's order, and a position that resumes anywhere.

[Note: Positions] An epoch's order is a function of (seed, epoch, data set length) alone. Position p of it,
counted from where the epoch was begun or resumed, goes to rank p % W. So when W ranks have taken k samples
each, exactly the first k * W positions are taken, and the rest can be dealt anew to any number of ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import chain
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.utils.data import Dataset, Sampler

from samestep.data import permutation
from samestep.data.orders import Orders, Sequential, Shuffled
from samestep.environment import read_environment
from samestep.errors import DataError
from samestep.process_group import given_or_default

__all__ = ["DistributedSampler", "Mode", "whole"]

Mode = Literal["pad", "drop", "exact"]

_STATE_VERSION = 1
_BLOCK_LENGTH = 8192  # indices made at a time: enough to hide numpy's call overhead, under 1 MB in all


class DistributedSampler(Sampler[int]):
    """This rank's share of the data set's indices, in an order that differs from epoch to epoch.

    Use it like torch's: `DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset))`.

    *Modes.* `"pad"` (default) gives each rank equally many indices by repeating fewer than `num_replicas`
    samples from the start of the order. `"drop"` does so by leaving out fewer than `num_replicas` at its
    end. `"exact"` hands out each sample once on one rank, so ranks may differ by one: use it to evaluate.

    *Epochs* advance by themselves. An epoch starts when its first index is drawn (`iter()` alone starts
    nothing), whether or not it is then finished, and the next iteration to start is the next epoch: two
    `list(sampler)` are epochs 0 and 1. `set_epoch(e)` makes the next one epoch e, and those after it
    e + 1, e + 2, ... A DataLoader starts one iteration each time it is iterated over, with persistent
    workers too.

    *Resuming.* Save `state_dict()` and load it at any number of ranks, in mid-epoch: the next iteration
    hands out what was not consumed yet, nothing twice and nothing left out. A DataLoader draws indices
    ahead of the training loop, so the sampler cannot see what has been trained on; say it after each step::

        for batch in loader:
            ...
            sampler.consumed(len(batch))

    The count is this rank's own, the length of the batch at hand: no multiplying by ranks, no short last
    batch to forget, and more than was handed out is an error. A sampler that is never told takes what
    it handed out for consumed, which is right only where nothing draws ahead (no DataLoader workers).

    A DataLoader with `drop_last=True` leaves the tail of each share unconsumed, so that state saved after
    the last batch is still in that epoch: call `set_epoch(epoch + 1)` before you save there.

    Ranks: each makes its own, with equal arguments but `rank`. Nothing here communicates.

    Memory: below 1 MB whatever the length of the data set.

    Args:
        dataset: anything with a length; its items are not touched.
        num_replicas: number of ranks. Default: those of `process_group`; else of the world; else what the
            launcher said; else 1.
        rank: this process's among them; same default.
        shuffle: False keeps the data set's order.
        seed: of the orders; equal on all ranks.
        drop_last: torch's name for `mode="drop"`.
        mode: `"pad"`, `"drop"` or `"exact"`.
        process_group: the ranks to share the data among, instead of the world.

    Raises:
        DataError: the data set is empty, has no length, or holds fewer samples than there are ranks
            (unless `"exact"`); `rank` is not one of `num_replicas`; `mode` is unknown.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        mode: Mode | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.dataset = dataset
        self.num_replicas, self.rank = _place(num_replicas, rank, process_group)
        self.shuffle = shuffle
        self.seed = whole(seed, "seed")
        self.mode = _mode(mode, drop_last)
        self.drop_last = self.mode == "drop"
        self._length = _length(dataset)
        _check_length(self._length, self.num_replicas, self.mode)
        self._orders: Orders = Shuffled(self._length, self.seed) if shuffle else Sequential(self._length)
        self._current: _Iteration | None = None  # the one under way, or the last one
        self._next_epoch = 0
        self._next_start = 0  # the position the next iteration starts at: not 0 only after a resume
        self._told = False  # whether consumed() was ever called: then only that counts

    @property
    def epoch(self) -> int:
        """The epoch under way; before its first index is drawn, the one to come."""
        return self._next_epoch if self._current is None else self._current.epoch

    @property
    def total_size(self) -> int:
        """The number of indices that all ranks together hand out in a whole epoch."""
        return self._stop(0)

    @property
    def num_samples(self) -> int:
        """The number of indices that this rank hands out in a whole epoch."""
        return len(self._share(0))

    def __len__(self) -> int:
        """The number of indices of the next iteration: `num_samples`, less after a resume in mid-epoch."""
        return len(self._share(self._next_start))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._blocks())

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch, from its start.

        The one exception is the epoch of a state that was loaded and not yet iterated over: naming it
        again, as `for epoch in range(sampler.epoch, num_epochs): sampler.set_epoch(epoch)` does, keeps the
        position.
        """
        epoch = whole(epoch, "epoch")
        if self._current is not None or epoch != self._next_epoch:
            self._next_start = 0
        self._next_epoch = epoch
        self._current = None

    def consumed(self, num_samples: int) -> None:
        """Count `num_samples` more of those handed out to this rank as trained on.

        Raises:
            DataError: that is more than this epoch's iteration has handed out: a count over all ranks
                instead of this rank's own, or samples of another loader.
        """
        if self._current is None:
            raise DataError(f"consumed({num_samples}): no iteration of this sampler has started")
        total = self._current.num_consumed + whole(num_samples, "num_samples")
        if total > self._current.num_handed_out:
            raise DataError(
                f"consumed({num_samples}) makes {total} of the {self._current.num_handed_out} samples that "
                f"rank {self.rank} was handed in epoch {self._current.epoch}: count this rank's own samples, "
                "once each"
            )
        self._current.num_consumed = total
        self._told = True

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands in its data, as JSON can hold it, for `load_state_dict` at any world size.

        Ranks: rank 0's is the one to save. The others' are equal after equal counts; in `"exact"` mode
        they may lack the one sample less that they had in the end.
        """
        epoch, position = self._next_epoch, self._next_start
        if self._current is not None:
            here = self._current
            count = here.num_consumed if self._told else here.num_handed_out
            epoch, position = here.epoch, here.start + count * self.num_replicas
            if position >= min(self._stop(here.start), self._length):
                epoch, position = epoch + 1, 0
        return {
            "version": _STATE_VERSION,
            "permutation_version": permutation.VERSION,
            "dataset_length": self._length,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "mode": self.mode,
            "epoch": epoch,
            "num_consumed": position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on where the run that saved `state` stood; ranks may be more or fewer.

        Raises:
            DataError: `state` is not a sampler's, or of another data set length, seed, shuffle or mode.
        """
        own = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(own):
            raise DataError(f"this is not the state of a DistributedSampler: {_brief(state)}")
        for key in ("version", "permutation_version", "dataset_length", "shuffle", "seed", "mode"):
            if state[key] != own[key]:
                raise DataError(
                    f"the sampler's saved state has {key}={state[key]!r}, this sampler {key}={own[key]!r}: "
                    "they order the data differently; make them equal, or start the epoch anew without the "
                    "state"
                )
        epoch, position = whole(state["epoch"], "epoch"), whole(state["num_consumed"], "num_consumed")
        if not 0 <= position <= self._length:
            raise DataError(f"num_consumed={position} is not in 0..{self._length}, the data set's length")
        self._current = None
        self._next_epoch, self._next_start = epoch, position

    @property
    def orders(self) -> Orders:
        """The order of each epoch, all ranks together."""
        return self._orders

    def rows_by_rank(self, num_rows: Sequence[int]) -> list[npt.NDArray[np.int64]]:
        """For each rank, which samples the first `num_rows[rank]` were that it was handed; for `gather`.

        They are data set indices, unless samples may be drawn repeatedly: then positions in the order.

        Raises:
            DataError: a rank has more rows than it was handed samples.
        """
        if len(num_rows) != self.num_replicas:
            raise DataError(f"{len(num_rows)} ranks gather what a sampler dealt to {self.num_replicas}")
        epoch, start = (self._next_epoch, 0) if self._current is None else (self.epoch, self._current.start)
        order = self._orders.of(epoch)
        rows = []
        for rank, count in enumerate(num_rows):
            share = range(start + rank, self._stop(start), self.num_replicas)
            if count > len(share):
                raise DataError(
                    f"rank {rank} gathers {count} rows and was handed {len(share)} samples in epoch {epoch}: "
                    "gather what one pass over the data gave, each sample once"
                )
            positions = np.arange(share.start, share.stop, share.step, dtype=np.uint64)[:count]
            positions %= np.uint64(self._length)
            rows.append(positions.view(np.int64) if self._orders.repeats else order(positions))
        return rows

    def _stop(self, start: int) -> int:
        """The position after the last one that all ranks together take, beginning at `start`."""
        remaining = self._length - start
        if self.mode == "pad":
            remaining = -(-remaining // self.num_replicas) * self.num_replicas
        elif self.mode == "drop":
            remaining = remaining // self.num_replicas * self.num_replicas
        return start + remaining

    def _share(self, start: int) -> range:
        """The positions that this rank takes, beginning at `start`."""
        return range(start + self.rank, self._stop(start), self.num_replicas)

    def _blocks(self) -> Iterator[Iterator[int]]:
        if _length(self.dataset) != self._length:
            raise DataError(
                f"the data set had {self._length} samples when the sampler was made and has "
                f"{_length(self.dataset)} now: make a new sampler"
            )
        here = self._current = _Iteration(self._next_epoch, self._next_start)
        self._next_epoch, self._next_start = here.epoch + 1, 0
        order = self._orders.of(here.epoch)
        share = self._share(here.start)
        for first in range(0, len(share), _BLOCK_LENGTH):
            block = share[first : first + _BLOCK_LENGTH]
            positions = np.arange(block.start, block.stop, block.step, dtype=np.uint64)
            if block[-1] >= self._length:  # padding: from the start of the order again
                positions %= np.uint64(self._length)
            yield here.hand_out(order(positions).tolist())


class _Iteration:
    """One iteration over an epoch, or over what is left of it from position `start`."""

    def __init__(self, epoch: int, start: int) -> None:
        self.epoch = epoch
        self.start = start
        self.num_consumed = 0
        self._num_made = 0
        self._block: Iterator[int] = iter(())

    def hand_out(self, indices: list[int]) -> Iterator[int]:
        self._num_made += len(indices)
        self._block = iter(indices)
        return self._block

    @property
    def num_handed_out(self) -> int:
        # The list's iterator knows how much of it is left, so that nothing need be counted per index.
        return self._num_made - operator.length_hint(self._block)


def _place(
    num_replicas: int | None, rank: int | None, process_group: dist.ProcessGroup | None
) -> tuple[int, int]:
    if num_replicas is None or rank is None:
        group = given_or_default(process_group)
        if group is not None:
            default_size, default_rank = group.size(), group.rank()
        else:
            environment = read_environment()
            default_size, default_rank = environment.world_size, environment.rank
        num_replicas = default_size if num_replicas is None else num_replicas
        rank = default_rank if rank is None else rank
    num_replicas, rank = whole(num_replicas, "num_replicas"), whole(rank, "rank")
    if num_replicas < 1:
        raise DataError(f"num_replicas={num_replicas}: at least 1 rank must take the data")
    if not 0 <= rank < num_replicas:
        raise DataError(f"rank={rank} is not in 0..{num_replicas - 1} (num_replicas={num_replicas})")
    return num_replicas, rank


def _mode(mode: str | None, drop_last: bool) -> Mode:
    if mode is None:
        return "drop" if drop_last else "pad"
    if mode not in get_args(Mode):
        raise DataError(f"mode={mode!r} is not one of {', '.join(map(repr, get_args(Mode)))}")
    if drop_last and mode != "drop":
        raise DataError(f"drop_last=True contradicts mode={mode!r}: give one of them")
    return cast(Mode, mode)


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        raise DataError(
            f"{type(dataset).__name__} has no length, so it cannot be shared out by index: give it a "
            "__len__, or let each rank read its own part"
        ) from None


def _check_length(length: int, num_replicas: int, mode: Mode) -> None:
    if length == 0:
        raise DataError("the data set is empty: there is nothing to hand out")
    if length < num_replicas and mode != "exact":
        raise DataError(
            f"the data set has {length} samples for {num_replicas} ranks: start at most {length} ranks, or "
            'let some of them have none with mode="exact"'
        )


def whole(value: Any, name: str, *, least: int | None = None) -> int:
    """`value` as an int.

    Raises:
        DataError: it is none, or below `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise DataError(f"{name}={value!r} is not a whole number") from None
    if least is not None and number < least:
        raise DataError(f"{name}={number}: it must be at least {least}")
    return number


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
