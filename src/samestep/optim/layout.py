"""Who owns what: every bucket of parameters is cut in one contiguous slice per rank. Pure.

[Note: Where a cut may be]
Kernels run over most of a tensor in vectors and over its last few elements one by one, and the two may round
differently (fused multiply-add). So that an element is computed as it would be in the whole parameter,
a parameter is cut at multiples of `ALIGNMENT` from its own start: its tail stays a tail.

[Note: Pieces that fit in a cache]
An optimizer passes over its tensors a dozen times in one step. On a CPU it does so in memory if they are
long, in a cache if they are not, and its temporaries are as long as they. So there, pieces and runs are no
longer than `CACHED`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["ALIGNMENT", "CACHED", "BucketLayout", "Piece", "even_cuts", "whole_cuts"]

ALIGNMENT = 64  # elements: two of the widest vectors, of the narrowest floats
CACHED = 2**18  # elements, 1 MB of float32


@dataclass(frozen=True)
class Piece:
    """The elements `start`, ..., `stop - 1` of one parameter, in the order of its memory."""

    parameter: int  # its number
    start: int
    stop: int
    offset: int  # where `start` lies in the bucket

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class BucketLayout:
    """The parameters that lie in one flat buffer, one after the other, and who owns which part of it."""

    parameters: tuple[int, ...]
    numels: tuple[int, ...]
    cuts: tuple[int, ...]  # rank r owns the elements cuts[r], ..., cuts[r + 1] - 1
    whole: bool = False  # no parameter is cut

    @property
    def numel(self) -> int:
        """The number of elements of all its parameters."""
        return sum(self.numels)

    def offsets(self) -> list[int]:
        """Where each parameter begins."""
        return list(accumulate(self.numels, initial=0))[:-1]

    def pieces(self, rank: int, longest: int | None = None) -> list[Piece]:
        """What `rank` owns, in order; parameters without elements belong to nobody.

        `longest`: pieces of more elements, a multiple of ALIGNMENT, are cut further.
        """
        first, last = self.cuts[rank], self.cuts[rank + 1]
        found = []
        offset = 0
        for parameter, numel in zip(self.parameters, self.numels, strict=True):
            begin, end = max(first, offset), min(last, offset + numel)
            for start in range(begin, end, longest or max(1, end - begin)):
                stop = min(end, start + longest) if longest else end
                found.append(Piece(parameter, start - offset, stop - offset, start))
            offset += numel
        return found


def even_cuts(numels: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Cuts of a bucket in `num_ranks` slices that differ by less than 2 * ALIGNMENT elements."""
    total = sum(numels)
    ends = list(accumulate(numels))
    cuts = [0]
    for rank in range(1, num_ranks):
        ideal = total * rank // num_ranks
        place = bisect_right(ends, ideal)
        if place == len(ends):
            cuts.append(total)
            continue
        begin = ends[place] - numels[place]
        within = round((ideal - begin) / ALIGNMENT) * ALIGNMENT
        cuts.append(begin + min(within, numels[place]))
    return (*cuts, total)


def whole_cuts(buckets: Sequence[Sequence[int]], num_ranks: int) -> list[tuple[int, ...]]:
    """Cuts of several buckets, between parameters: each rank has about as much of all of them together."""
    total = max(1, sum(map(sum, buckets)))
    done = 0
    result = []
    for numels in buckets:
        ends = [0] * num_ranks
        here = 0
        for numel in numels:
            owner = min(num_ranks - 1, (2 * done + numel) * num_ranks // (2 * total))  # that of its middle
            done += numel
            here += numel
            for rank in range(owner, num_ranks):
                ends[rank] = here
        result.append((0, *ends))
    return result
