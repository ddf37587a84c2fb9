"""Random streams of the data: each sample's own, so that augmentation is the same whoever loads it.

[Note: Sample streams] torch's fetcher loads a micro-batch by `[dataset[i] for i in indices]`, in the main
process or in a worker. Our `indices` are a list whose iterator seeds torch, numpy and `random` just before it
hands out each index, from (seed, epoch, sample): whatever `dataset[i]` draws depends on nothing else. When
the list is exhausted the streams are seeded once more, for what `collate_fn` draws; and when it arrives, for
a data set that fetches whole batches (`__getitems__`) and may not go through the list one by one. Three
seedings take 8 us or so. A worker's streams are nobody else's; in the main process, `KeptStreams` puts back
what was there before.

torch and numpy take 32 bits as a seed, so among 100,000 samples a pair or two share a stream.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from samestep.data.keyed import word

__all__ = ["SampleIndices", "start_streams"]

_LOW = 2**32 - 1
# Numbers of streams that are no sample's. Samples' are data set indices or positions, far below.
COLLATE = 2**63
ARRIVAL = 2**63 + 1


def start_streams(key: int, number: int) -> None:
    """torch's CPU stream, numpy's and `random`'s begin anew, as number `number` under `key`."""
    seed = word(key, number)
    # Not torch.manual_seed: it also looks after every kind of accelerator, which takes 0.2 ms.
    torch.default_generator.manual_seed(seed & _LOW)
    np.random.seed(seed >> 32)
    random.seed(seed)


class SampleIndices(list[int]):
    """The indices of a micro-batch; going through them starts each sample's random streams in turn.

    Args:
        indices: into the data set.
        numbers: of the samples' streams, one per index.
        key: of (seed, epoch).
    """

    def __init__(self, indices: Iterable[int], numbers: Sequence[int], key: int) -> None:
        super().__init__(indices)
        self.numbers = numbers
        self.key = key

    def arrive(self) -> SampleIndices:
        """The list itself, with streams started for a data set that does not go through it."""
        start_streams(self._key_of_batch(), ARRIVAL)
        return self

    def plain(self) -> list[int]:
        """The indices alone."""
        return list(super().__iter__())

    def __iter__(self) -> Iterator[int]:
        for index, number in zip(super().__iter__(), self.numbers, strict=True):
            start_streams(self.key, number)
            yield index
        start_streams(self._key_of_batch(), COLLATE)

    def _key_of_batch(self) -> int:
        return word(self.key, self.numbers[0] if self.numbers else 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.plain(), self.numbers, self.key)


def _arrived(indices: list[int], numbers: Sequence[int], key: int) -> SampleIndices:
    return SampleIndices(indices, numbers, key).arrive()
