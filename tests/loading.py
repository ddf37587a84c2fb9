"""What the tests of the loader share: loaders of several ranks in one thread, and data sets worth loading."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from samestep.data import DataLoader
from samestep.virtual import VirtualRanks, virtual_ranks


def group_of(rank: int, size: int, virtual_size: int | None) -> dist.ProcessGroup:
    """A group that knows its rank and size and cannot communicate: the loader never does."""
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    virtual_ranks(group, attach=VirtualRanks(rank, size, virtual_size=virtual_size))
    return group


def loaders(
    dataset: Any, size: int, virtual_size: int | None, *args: Any, **options: Any
) -> list[DataLoader]:
    """The loader of each of `size` ranks; each has its own data set if `dataset` is a function."""
    made = []
    for rank in range(size):
        own = dataset() if isinstance(dataset, FunctionType) else dataset
        group = group_of(rank, size, virtual_size)
        made.append(DataLoader(own, *args, process_group=group, **options))
    return made


def plain(value: Any) -> Any:
    """Tensors as lists, which compare."""
    return value.tolist() if isinstance(value, torch.Tensor) else value


def turns_of(loader: DataLoader, num_steps: int | None = None) -> list[tuple[Any, ...]]:
    """(step, virtual rank, micro-batch, weight, batch) of every turn of the next `num_steps` steps."""
    turns = []
    for number, step in enumerate(loader):
        for batch in step:
            turn = loader.virtual.current
            assert turn is not None
            turns.append((turn.step, turn.position, turn.micro_batch, turn.weight, plain(batch)))
        if number + 1 == num_steps:
            break
    return turns


def merged(ranks: list[list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """The turns of all ranks in the order of one process that plays them all."""
    return sorted((turn for turns in ranks for turn in turns), key=lambda turn: turn[:3])


class Augmented(Dataset[Any]):
    """Samples that draw from every random stream."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


class AtOnce(Augmented):
    """The same, fetched by whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        noise = torch.rand(len(indices)).tolist()
        return [(index, noise[i], 0.0, 0.0) for i, index in enumerate(np.array(indices).tolist())]


def noisy_collate(items: list[Any]) -> Any:
    """Draws, too, as mixing samples does."""
    return items, torch.rand(()).item(), float(np.random.rand()), random.random()


def as_list(items: list[Any]) -> list[Any]:
    return items


class Numbers(IterableDataset[Any]):
    """0, 1, 2, ... with noise; remembers which epoch it was told."""

    def __init__(self, length: int, *, noisy: bool = False) -> None:
        self.length = length
        self.noisy = noisy
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()  # as data sets do that share themselves out
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.length, stride):
            yield (number, self.epoch, random.random(), torch.rand(()).item()) if self.noisy else number


class Resumable(Numbers):
    """A stream that says where it stands, and can go on there without reading what was before."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.position = 0
        self.was_read: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.length:
            self.position += 1
            self.was_read.append(self.position - 1)
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
