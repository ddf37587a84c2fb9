"""What a `DataLoader`'s arguments come to: checked, and made into a shape of steps and their source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Subset, TensorDataset, default_collate, default_convert

from samestep.data.orders import Sequential, Shuffled
from samestep.data.plan import LoaderMode, StepShape
from samestep.data.requests import SamplerSource, Source, StoredSource
from samestep.data.sampler import DistributedSampler, whole
from samestep.data.stream import StreamSource
from samestep.data.weighted import WeightedSampler
from samestep.environment import read_environment
from samestep.errors import DataError
from samestep.process_group import given_or_default
from samestep.virtual import VirtualRanks, virtual_ranks

__all__ = [
    "FirstOnly",
    "check_players",
    "collate_of",
    "draws_nothing",
    "is_stream",
    "length_of",
    "players",
    "shape_of",
    "source_of",
]


def players(owner: Any, group: dist.ProcessGroup | None) -> VirtualRanks:
    """The virtual ranks of the `World` `owner`, of `group`, of the world that there is, or of one process."""
    if owner is not None and group is not None:
        raise DataError("world and process_group: give one of them")
    group = owner.group if owner is not None else given_or_default(group)
    if group is not None:
        return virtual_ranks(group)
    environment = read_environment()
    return VirtualRanks(environment.rank, environment.world_size)


def check_players(virtual: VirtualRanks, owner: Any, group: dist.ProcessGroup | None) -> None:
    """Raise if a world has come or gone since `virtual` was found: the wrapper would look at other turns."""
    there_is_one = owner is not None or given_or_default(group) is not None
    if there_is_one and players(owner, group) is not virtual:
        raise DataError(
            "the loader was made in another world than this one, or before it: make it inside of the `with "
            "samestep.World(...)` block, after init_process_group()"
        )


def is_stream(dataset: Any) -> bool:
    """Whether `dataset` can only be iterated over."""
    return isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__getitem__")


def length_of(dataset: Any) -> int | None:
    """Its length; None if it has none."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def shape_of(
    virtual: VirtualRanks,
    batch_size: int | None,
    accumulation: int | None,
    mode: LoaderMode | None,
    drop_last: bool,
) -> StepShape:
    """The shape of steps; a unit is a batch where `batch_size` is None."""
    if mode is None:
        mode = "drop" if drop_last else "exact"
    if mode not in get_args(LoaderMode):
        raise DataError(f"mode={mode!r} is not one of {', '.join(map(repr, get_args(LoaderMode)))}")
    if drop_last and mode != "drop":
        raise DataError(f"drop_last=True contradicts mode={mode!r}: give one of them")
    if mode == "evaluate" and accumulation is not None:
        raise DataError('accumulation is for training: mode="evaluate" has no steps to accumulate in')
    return StepShape(
        virtual_size=virtual.num_ranks if mode == "evaluate" else virtual.virtual_size,
        batch_size=1 if batch_size is None else whole(batch_size, "batch_size", least=1),
        accumulation=1 if accumulation is None else whole(accumulation, "accumulation", least=1),
        mode=mode,
    )


def source_of(
    dataset: Any,
    shuffle: bool | None,
    sampler: Any,
    batch_sampler: Any,
    shape: StepShape,
    block: range,
    seed: int,
) -> Source:
    """Where the requests come from: the data set's own length, a sampler, or the stream that it is."""
    given = {"shuffle": bool(shuffle), "sampler": sampler, "batch_sampler": batch_sampler}
    chosen = [name for name, value in given.items() if value is not None and value is not False]
    if len(chosen) > 1:
        raise DataError(f"{' and '.join(chosen)} each say which samples come when: give one of them")
    if chosen and shape.mode == "evaluate":
        raise DataError(
            f'mode="evaluate" goes through the whole data set in its order: drop {chosen[0]}; for a part of '
            "the data set give torch.utils.data.Subset(dataset, indices)"
        )
    if is_stream(dataset):
        if chosen:
            raise DataError(
                f"{type(dataset).__name__} is iterable and has an order of its own: drop {chosen[0]}"
            )
        return StreamSource(shape, block, length_of(dataset))
    if batch_sampler is not None:
        return SamplerSource(batch_sampler, shape, block, seed, batches=True)
    if isinstance(sampler, WeightedSampler):
        if length_of(dataset) not in (None, sampler.num_weights):
            raise DataError(
                f"{sampler.num_weights} weights for {length_of(dataset)} samples: give one for each"
            )
        return StoredSource(sampler.orders, shape, block, seed)
    if isinstance(sampler, DistributedSampler | torch.utils.data.DistributedSampler):
        raise DataError(
            "a DistributedSampler shares samples out, and so does this loader: drop it, and say shuffle=True "
            "and seed= here; or keep it, with torch's DataLoader"
        )
    if sampler is not None:
        return SamplerSource(sampler, shape, block, seed, batches=False)
    length = length_of(dataset)
    if length is None:
        raise DataError(f"{type(dataset).__name__} has no length: give it a __len__, or a sampler")
    _check_length(length, shape)
    return StoredSource(Shuffled(length, seed) if shuffle else Sequential(length), shape, block, seed)


def _check_length(length: int, shape: StepShape) -> None:
    if length == 0 and shape.mode != "evaluate":
        raise DataError("the data set is empty: there is nothing to hand out")
    if shape.mode == "drop" and length < shape.num_units:
        raise DataError(
            f"the data set has {length} samples and a step takes {shape.num_units} ({shape.virtual_size} "
            f"virtual ranks, {shape.accumulation} x {shape.batch_size} samples each), so that dropping what "
            'is left over drops all: lower batch_size, or take mode="exact"'
        )


class FirstOnly:
    """The collate function of batches that come ready-made: there is one, and it is converted."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self.convert = convert

    def __call__(self, items: list[Any]) -> Any:
        (item,) = items
        return self.convert(item)


def collate_of(collate_fn: Callable[[Any], Any] | None, *, ready_made: bool) -> Callable[[list[Any]], Any]:
    """What makes a batch of a list of samples."""
    if ready_made:
        return FirstOnly(collate_fn or default_convert)
    return collate_fn or default_collate


def draws_nothing(dataset: Any) -> bool:
    """Whether it is certain that loading a sample draws no random numbers."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) in (TensorDataset, list, tuple, range, torch.Tensor, np.ndarray)
