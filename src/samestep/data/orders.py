"""Orders: what stands at which position of an epoch, for every epoch of a run; computed, not stored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from samestep.data import permutation
from samestep.data.keyed import Words, key_of, uniform
from samestep.data.permutation import Permutation
from samestep.errors import DataError

__all__ = ["Order", "Orders", "Sequential", "Shuffled", "Weighted"]

Indices = npt.NDArray[np.int64]
# Positions -> the data set's indices there.
Order = Callable[[Words], Indices]


class Orders(Protocol):
    """The order of each epoch."""

    length: int  # positions in an epoch
    repeats: bool  # whether an index may stand at several positions

    def of(self, epoch: int) -> Order:
        """The order of one epoch."""
        ...

    def facts(self) -> dict[str, Any]:
        """What must be equal in a run that continues another, as JSON can hold it."""
        ...


class Sequential:
    """The data set's own order, in every epoch."""

    repeats = False

    def __init__(self, length: int) -> None:
        self.length = length

    def of(self, epoch: int) -> Order:
        return lambda positions: positions.view(np.int64)

    def facts(self) -> dict[str, Any]:
        return {"order": "sequential"}


class Shuffled:
    """Another permutation in every epoch."""

    repeats = False

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed

    def of(self, epoch: int) -> Order:
        return Permutation(self.length, seed=self.seed, epoch=epoch)

    def facts(self) -> dict[str, Any]:
        return {"order": f"shuffled {permutation.VERSION}", "order_seed": self.seed}


class Weighted:
    """Indices drawn in proportion to their weights, `length` of them in each epoch.

    With replacement each position is a draw of its own: nobody draws for others. Without, position p holds
    the index whose exponential clock, running at the speed of its weight, rings as number p; that takes a
    draw for each index, on every rank.

    Memory: 8 bytes per weight; without replacement 8 more.

    Source: Efraimidis & Spirakis, "Weighted random sampling with a reservoir" (2006), for the clocks.
    """

    def __init__(
        self, weights: Sequence[float] | Any, num_samples: int | None, *, replacement: bool, seed: int
    ) -> None:
        self.weights = _checked(weights)
        if num_samples is None:
            num_samples = self.weights.size if replacement else int(np.count_nonzero(self.weights))
        if num_samples < 1:
            raise DataError(f"num_samples={num_samples}: at least 1 sample must be drawn")
        self.length = num_samples
        self.repeats = replacement
        self.seed = seed
        if replacement:
            # One after the other, as cumsum adds: the same sums on every machine.
            with np.errstate(over="ignore"):
                self._sums = np.cumsum(self.weights)
            if not np.isfinite(self._sums[-1]):
                raise DataError("the sum of the weights is infinite: scale them down")
        elif num_samples > np.count_nonzero(self.weights):
            raise DataError(
                f"num_samples={num_samples} without replacement, but only {np.count_nonzero(self.weights)} "
                "weights are above 0: draw fewer, or with replacement"
            )
        self._ranking: tuple[int, Indices] | None = None  # of the last epoch asked for

    def of(self, epoch: int) -> Order:
        key = key_of(f"weighted order {permutation.VERSION}", self.seed, epoch)
        if self.repeats:
            return lambda positions: self._draw(key, positions)
        ranking = self._ranking
        if ranking is None or ranking[0] != epoch:
            self._ranking = ranking = (epoch, self._rank(key))
        indices = ranking[1]
        return lambda positions: indices[positions]

    def facts(self) -> dict[str, Any]:
        digest = hashlib.sha256(self.weights.astype("<f8").tobytes()).hexdigest()
        kind = "with" if self.repeats else "without"
        return {
            "order": f"weighted {permutation.VERSION}, {kind} replacement, weights {digest[:16]}",
            "order_seed": self.seed,
        }

    def _draw(self, key: int, positions: Words) -> Indices:
        total = self._sums[-1]
        # Rounding may make u * total the total itself, which lies beyond the last index.
        targets = np.minimum(uniform(key, positions) * total, np.nextafter(total, 0.0))
        drawn: Indices = np.searchsorted(self._sums, targets, side="right")
        return drawn

    def _rank(self, key: int) -> Indices:
        candidates = np.flatnonzero(self.weights)
        draws = uniform(key, candidates.astype(np.uint64))
        times = _minus_log(draws + 2.0**-54) / self.weights[candidates]
        first: Indices = candidates[np.argsort(times, kind="stable")[: self.length]]
        return first


def _minus_log(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """-log of values in (0, 1), to 1e-15, by IEEE additions, products and quotients alone.

    numpy's own log differs between processors in the last bit, and so would, now and then, an order.
    """
    mantissa, exponent = np.frexp(values)
    small = mantissa < 0.7071067811865476
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    exponent = exponent - small
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = np.full_like(square, 1.0 / 23.0)
    for divisor in range(21, 0, -2):
        series = series * square + 1.0 / divisor
    result: npt.NDArray[np.float64] = -(exponent * 0.6931471805599453 + 2.0 * ratio * series)
    return result


def _checked(weights: Any) -> npt.NDArray[np.float64]:
    values = np.asarray(weights, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise DataError(f"weights of shape {list(values.shape)}: give one number per sample")
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if bad.size:
        raise DataError(f"weight {bad[0]} is {values[bad[0]]}: weights are finite and at least 0")
    if not values.any():
        raise DataError("all weights are 0: nothing can be drawn")
    return values
