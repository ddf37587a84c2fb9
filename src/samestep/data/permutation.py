"""A shuffle of n items in O(1) memory: position -> index, computed block by block instead of stored.

[Note: The permutation] A Feistel network over pairs (left, right) with `left < num_left`,
`right < num_right` and `num_left * num_right >= n`, both near the square root of n. Each round adds to one
half a keyed hash of the other, modulo its range: invertible whatever the hash, so the network is a
permutation of all pairs. Pairs stand for `left * num_right + right`; the few results >= n (about one in
sqrt(n)) go through the network again until they land below n, which keeps it a permutation of 0..n-1.
Up to `_SORTED_LENGTH` items it is simpler, and more uniform, to sort the items by a keyed hash.

All arithmetic is on 64-bit unsigned integers, so the order is the same on every machine, and does not
depend on any library's random generator, whose streams change between versions. A change to anything in
this file changes every run's data order: raise `VERSION`, which saved sampler states carry.

Source: Black & Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), for the network and the walk.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from samestep.errors import DataError

__all__ = ["VERSION", "Permutation"]

VERSION = 1
_NUM_ROUNDS = 6
_SORTED_LENGTH = 4096
_HALF = np.uint64(32)

Words = npt.NDArray[np.uint64]


class Permutation:
    """The order of an epoch: a permutation of 0..length-1 that depends on (seed, epoch, length) alone.

    Memory: none that grows with `length` beyond 32 KiB; a call needs five arrays of its argument's size.

    Args:
        length: number of items, 1 to 2**62.
        seed: any whole number.
        epoch: any whole number. (seed 0, epoch 1) and (seed 1, epoch 0) are unrelated orders.

    Raises:
        DataError: `length` is out of range.
    """

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        if not 1 <= length <= 2**62:
            raise DataError(f"cannot shuffle {length} items: from 1 to 2**62 are possible")
        self.length = length
        self._rounds = [_Round.of_key(seed, epoch, index) for index in range(_NUM_ROUNDS)]
        self._sorted: npt.NDArray[np.int64] | None = None
        if length <= _SORTED_LENGTH:
            self._sorted = self._sort_by_hash()
        num_left = math.isqrt(length - 1) + 1
        self._num_left = np.uint64(num_left)
        self._num_right = np.uint64(-(-length // num_left))

    def __call__(self, positions: Words) -> npt.NDArray[np.int64]:
        """The indices at `positions` of the order.

        Shapes: positions: 1-D uint64, each below `length`. Returns int64 of the same shape.
        """
        if self._sorted is not None:
            return self._sorted[positions]
        values = self._network(positions)
        limit = np.uint64(self.length)
        outside = np.flatnonzero(values >= limit)
        while outside.size:
            values[outside] = self._network(values[outside])
            outside = outside[values[outside] >= limit]
        return values.view(np.int64)

    def _network(self, values: Words) -> Words:
        left: Words = values // self._num_right
        right: Words = values - left * self._num_right
        hashed, scratch = np.empty_like(values), np.empty_like(values)
        halves = ((right, left, self._num_left), (left, right, self._num_right))
        for index, round_ in enumerate(self._rounds):
            source, target, modulus = halves[index % 2]
            round_.hash_below(modulus, source, hashed, scratch)
            target += hashed
            # Below 2 * modulus now. Where it was below modulus the difference wraps around and is larger.
            np.subtract(target, modulus, out=scratch)
            np.minimum(target, scratch, out=target)
        left *= self._num_right
        left += right
        return left

    def _sort_by_hash(self) -> npt.NDArray[np.int64]:
        keys = np.arange(self.length, dtype=np.uint64)
        for round_ in self._rounds:
            keys = round_.mix(keys)
        return np.argsort(keys, kind="stable")


@dataclass(frozen=True)
class _Round:
    """The random words of one round; both multipliers are odd, so that multiplying loses nothing."""

    first: np.uint64
    offset: np.uint64
    second: np.uint64

    @classmethod
    def of_key(cls, seed: int, epoch: int, index: int) -> _Round:
        text = f"samestep permutation {VERSION}: seed {seed}, epoch {epoch}, round {index}"
        digest = hashlib.blake2b(text.encode(), digest_size=24).digest()
        first, offset, second = (int.from_bytes(digest[i : i + 8], "little") for i in (0, 8, 16))
        return cls(np.uint64(first | 1), np.uint64(offset), np.uint64(second | 1))

    def hash_below(self, modulus: np.uint64, values: Words, out: Words, scratch: Words) -> None:
        """`out` becomes a hash of `values`, uniform over 0..modulus-1; modulus is at most 2**32."""
        np.multiply(values, self.first, out=out)
        out += self.offset
        np.right_shift(out, _HALF, out=scratch)
        out ^= scratch
        out *= self.second
        out >>= _HALF
        out *= modulus
        out >>= _HALF

    def mix(self, values: Words) -> Words:
        """An invertible mix of 64-bit words: distinct values stay distinct."""
        mixed: Words = values * self.first + self.offset
        mixed ^= mixed >> _HALF
        mixed *= self.second
        return mixed
