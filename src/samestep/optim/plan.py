"""How an optimizer's parameters are laid out: in the buckets of their gradients, each cut for the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from samestep.gradients.arguments import parameter_infos
from samestep.gradients.bucket import Bucket
from samestep.gradients.buckets import plan_buckets
from samestep.gradients.reducer import Reducer
from samestep.optim.kinds import Kind
from samestep.optim.layout import BucketLayout, even_cuts, whole_cuts

__all__ = ["Planned", "plan_layouts"]


@dataclass(frozen=True)
class Planned:
    """A bucket of parameters to be laid out, and the bucket of gradients that it follows, if any."""

    layout: BucketLayout
    source: Bucket | None


@dataclass(frozen=True)
class _Members:
    numbers: tuple[int, ...]
    source: Bucket | None
    whole: bool


def plan_layouts(
    parameters: Sequence[nn.Parameter], reducers: Sequence[Reducer], kind: Kind, num_ranks: int
) -> list[Planned]:
    """The buckets of `parameters`, which are numbered by their position.

    Those that a reducer synchronises lie in the order of its buckets, a sparse one by itself and whole; the
    rest (frozen ones, or all if there is no reducer) in buckets planned as a reducer's would be.
    """
    number = {id(parameter): i for i, parameter in enumerate(parameters)}
    members: list[_Members] = []
    for reducer in reducers:
        for bucket in reducer.queue.buckets:
            ours = tuple(number.pop(id(s.param)) for s in bucket.slots if id(s.param) in number)
            members.append(_Members(ours, bucket, kind is Kind.WHOLE))
        sparse = [slot for slot in reducer.slots if slot.bucket is None and id(slot.param) in number]
        members += [_Members((number.pop(id(slot.param)),), None, True) for slot in sparse]
    left = sorted(number.values())
    members += [_Members(found, None, kind is Kind.WHOLE) for found in _by_themselves(parameters, left)]
    members = [m for m in members if m.numbers]

    numels = [[parameters[i].numel() for i in m.numbers] for m in members]
    whole = iter(whole_cuts([n for n, m in zip(numels, members, strict=True) if m.whole], num_ranks))
    planned = []
    for m, sizes in zip(members, numels, strict=True):
        cuts = next(whole) if m.whole else even_cuts(sizes, num_ranks)
        planned.append(Planned(BucketLayout(m.numbers, tuple(sizes), cuts, m.whole), m.source))
    return planned


def _by_themselves(parameters: Sequence[nn.Parameter], numbers: Sequence[int]) -> list[tuple[int, ...]]:
    infos = parameter_infos([(str(i), parameters[i]) for i in numbers])
    return [tuple(numbers[i] for i in bucket) for bucket in plan_buckets(infos).buckets]
