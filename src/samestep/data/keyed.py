"""Random words that are a function of (seed, epoch, what for, number), computed one by one or in bulk.

All arithmetic is on 64-bit unsigned integers: the words are the same on every machine and in every version
of every library, and no generator's state has to be kept, sent or advanced to get the millionth of them.

Source: Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators" (2014), for the mixing function.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

__all__ = ["Words", "key_of", "uniform", "word", "words"]

Words = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
_STRIDE = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def key_of(purpose: str, *numbers: int) -> int:
    """The 64-bit key of a stream of words; numbers of any size, in a fixed order."""
    text = f"samestep {purpose}: {', '.join(map(str, numbers))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def word(key: int, number: int) -> int:
    """Word `number` of the stream of `key`."""
    mixed = (key + number * _STRIDE) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _MASK
    return mixed ^ (mixed >> 31)


def words(key: int, numbers: Words) -> Words:
    """`word(key, number)` for each of `numbers`."""
    mixed: Words = numbers * np.uint64(_STRIDE) + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def uniform(key: int, numbers: Words) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), multiples of 2**-53, uniformly distributed."""
    fractions: npt.NDArray[np.float64] = (words(key, numbers) >> np.uint64(11)).astype(np.float64)
    fractions *= 2.0**-53
    return fractions
