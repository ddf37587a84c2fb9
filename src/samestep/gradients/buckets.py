"""The plan: which parameter's gradient travels in which bucket. Pure: no tensors, no process group.

One deterministic plan follows from the model alone. It is never re-made from what a first backward
happened to do, so a resumed run cuts its sums as the run it continues did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from samestep.errors import GradientError

__all__ = ["DEFAULT_CAP_MB", "FIRST_CAP_MB", "BucketPlan", "ParameterInfo", "plan_buckets"]

DEFAULT_CAP_MB = 25.0
FIRST_CAP_MB = 1.0  # small, so that communication starts soon after backward does
_MIB = 1024 * 1024


@dataclass(frozen=True)
class ParameterInfo:
    """What the plan, and the comparison of replicas, need to know of one parameter."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str  # "float32"
    device: str  # "cpu", "cuda": the index is each rank's own affair
    item_bytes: int
    sparse: bool = False  # its gradient is sparse (an embedding's): it travels outside of buckets
    place: int = 0  # tells the devices of one rank's multi-device module apart

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """The size of its gradient in bytes."""
        return self.numel * self.item_bytes


@dataclass(frozen=True)
class BucketPlan:
    """Parameters and the buckets they travel in, in the order of launch.

    `buckets[b]` lists indices into `parameters`; `sparse` lists those that travel outside of buckets.
    """

    parameters: tuple[ParameterInfo, ...]
    buckets: tuple[tuple[int, ...], ...]
    sparse: tuple[int, ...] = ()

    def bucket_bytes(self, bucket: int) -> int:
        """The size of one bucket's gradients in bytes."""
        return sum(self.parameters[i].bytes for i in self.buckets[bucket])

    def names(self, bucket: int) -> list[str]:
        """The names of the parameters in one bucket, in the order in which they lie in it."""
        return [self.parameters[i].name for i in self.buckets[bucket]]

    def regrouped(self, names: Sequence[Sequence[str]]) -> BucketPlan | None:
        """The same parameters in buckets of these `names`, in order; None if those are not this plan's."""
        index_of = {parameter.name: i for i, parameter in enumerate(self.parameters)}
        if sorted(name for bucket in names for name in bucket) != sorted(
            self.parameters[i].name for bucket in self.buckets for i in bucket
        ):
            return None
        buckets = tuple(tuple(index_of[name] for name in bucket) for bucket in names)
        for bucket in buckets:
            members = [self.parameters[i] for i in bucket]
            if len({(p.dtype, p.device, p.place) for p in members}) != 1:
                return None
        return replace(self, buckets=buckets)

    def to_json(self) -> dict[str, Any]:
        """The plan as data that JSON can hold; `from_json` gives it back."""
        return {
            "parameters": [asdict(p) for p in self.parameters],
            "buckets": [list(b) for b in self.buckets],
            "sparse": list(self.sparse),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BucketPlan:
        """The plan that `to_json` wrote."""
        parameters = tuple(
            ParameterInfo(**{**p, "shape": tuple(p["shape"]), "stride": tuple(p["stride"])})
            for p in data["parameters"]
        )
        return cls(parameters, tuple(tuple(b) for b in data["buckets"]), tuple(data["sparse"]))

    def __str__(self) -> str:
        lines = [f"{len(self.buckets)} buckets, launched in this order:"]
        for b, members in enumerate(self.buckets):
            first, last = self.parameters[members[0]], self.parameters[members[-1]]
            names = first.name if len(members) == 1 else f"{first.name} ... {last.name}"
            lines.append(
                f"  {b:>3}  {self.bucket_bytes(b) / _MIB:>9.3f} MiB  {first.dtype:<9} {first.device:<5} "
                f"{len(members):>5} parameters  {names}"
            )
        lines += [f"    -  sparse: {self.parameters[i].name}" for i in self.sparse]
        return "\n".join(lines)


def plan_buckets(
    parameters: Sequence[ParameterInfo],
    *,
    cap_mb: float | None = None,
    caps_mb: Sequence[float] | None = None,
) -> BucketPlan:
    """The plan for `parameters`, given in the order of their registration.

    Backward reaches parameters roughly in the reverse of that order, so buckets are filled in it; a
    bucket holds one dtype on one device. A bucket is closed by the parameter that fills it to its cap; one
    that would fill a bucket by itself gets it for itself, so that small ones before it need not wait.

    Args:
        parameters: what is to be reduced.
        cap_mb: size of a bucket in MiB. Default: 25, and 1 for the first one.
        caps_mb: the size of each bucket in turn; the last one holds for all that follow.

    Raises:
        GradientError: a cap is not positive.
    """
    caps = [c * _MIB for c in _caps_mb(cap_mb, caps_mb)]
    open_buckets: dict[tuple[str, str, int], list[int]] = {}
    open_bytes: dict[tuple[str, str, int], int] = {}
    closed: list[tuple[int, ...]] = []
    sparse: list[int] = []
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        if parameter.sparse:
            sparse.append(index)
            continue
        kind = (parameter.dtype, parameter.device, parameter.place)
        if open_bytes.get(kind) and parameter.bytes >= _cap(caps, len(closed)):
            closed.append(tuple(open_buckets.pop(kind)))
            del open_bytes[kind]
        open_buckets.setdefault(kind, []).append(index)
        open_bytes[kind] = open_bytes.get(kind, 0) + parameter.bytes
        if open_bytes[kind] >= _cap(caps, len(closed)):
            closed.append(tuple(open_buckets.pop(kind)))
            del open_bytes[kind]
    # The rest, ordered by where each began: the order in which backward completes them is not known.
    closed += sorted((tuple(b) for b in open_buckets.values()), key=lambda b: -b[0])
    return BucketPlan(tuple(parameters), tuple(closed), tuple(sparse))


def _cap(caps: Sequence[float], bucket: int) -> float:
    return caps[min(bucket, len(caps) - 1)]


def _caps_mb(cap_mb: float | None, caps_mb: Sequence[float] | None) -> list[float]:
    if caps_mb is not None:
        if not caps_mb:
            raise GradientError("bucket_cap_mb_list is empty: name at least one size in MiB")
        caps = list(caps_mb)
    elif cap_mb is not None:
        caps = [cap_mb]
    else:
        caps = [FIRST_CAP_MB, DEFAULT_CAP_MB]
    for cap in caps:
        if not cap > 0:
            raise GradientError(f"a bucket size of {cap} MiB was asked for: it must be positive")
    return caps
