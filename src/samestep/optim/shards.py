"""This rank's share of an optimizer: slices of all parameters, and the inner optimizer that updates them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep import collectives
from samestep.optim.flat import FlatBucket
from samestep.optim.layout import Piece
from samestep.optim.plan import Planned
from samestep.optim.runs import Run, group_pieces, joined_state, part_states
from samestep.optim.state import PartState

__all__ = ["MakeOptimizer", "Shards"]

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
_NOT_OPTIONS = ("params", "param_names")


class Shards:
    """Slices of the parameters, the runs they form, and their inner optimizer.

    Ranks: all make one alike. `update()` is a collective.

    Args:
        planned: the buckets.
        parameters: all of them, by number.
        param_groups: of the outer optimizer; the inner one's follow them.
        group: the ranks.
        make: makes the inner optimizer from parameter groups.
        merge: whether pieces of this bucket may be updated as one tensor.
        longest: the most elements of one tensor, see [Note: Pieces that fit in a cache] in layout.py.
        one_by_one: update and send bucket by bucket, so that one travels while the next is computed.
    """

    def __init__(
        self,
        planned: Sequence[Planned],
        parameters: Sequence[nn.Parameter],
        param_groups: Sequence[Mapping[str, Any]],
        group: dist.ProcessGroup,
        make: MakeOptimizer,
        *,
        merge: Callable[[FlatBucket], bool],
        longest: int | None,
        one_by_one: bool,
    ) -> None:
        self._group = group
        self._make = make
        self._merge = merge
        self._longest = longest
        self._num_groups = len(param_groups)
        of = [g for g, param_group in enumerate(param_groups) for _ in param_group["params"]]
        self._group_of = dict(enumerate(of))
        self.buckets = [
            FlatBucket(plan.layout, [parameters[i] for i in plan.layout.parameters], group, plan.source)
            for plan in planned
        ]
        self._one_by_one = one_by_one and group.size() > 1 and len(self.buckets) > 1
        self._runs: list[list[Run]] = []  # by bucket
        self.inner: torch.optim.Optimizer
        self.fill(param_groups, {})

    def fill(
        self, param_groups: Sequence[Mapping[str, Any]], states: Mapping[tuple[int, int], PartState]
    ) -> None:
        """The inner optimizer is made anew; the state of piece (parameter, start) is that in `states`."""
        grouped = []
        for bucket in self.buckets:
            longest = None if bucket.layout.whole else self._longest
            pieces = bucket.layout.pieces(self._group.rank(), longest)
            grouped.append(
                group_pieces(
                    bucket,
                    pieces,
                    [self._group_of[piece.parameter] for piece in pieces],
                    [states.get((piece.parameter, piece.start), PartState()) for piece in pieces],
                    merge=self._merge(bucket),
                    longest=longest,
                )
            )
        self._runs = [[run for run, _ in runs] for runs in grouped]
        self.inner = self._make(
            [
                {**_options(param_group), "params": self._params_of(g)}
                for g, param_group in enumerate(param_groups)
            ]
        )
        loaded = {
            run.param: joined_state(run, held)
            for runs in grouped
            for run, held in runs
            if any(map(bool, held))
        }
        if loaded:
            state: dict[Any, Any] = {**self.inner.state, **loaded}
            self.inner.__setstate__(
                {"state": defaultdict(dict, state), "param_groups": self.inner.param_groups}
            )

    def pieces(self) -> list[tuple[FlatBucket, Piece, PartState]]:
        """What this rank owns, with the state of each piece (views of the live one)."""
        found = []
        for bucket, runs in zip(self.buckets, self._runs, strict=True):
            for run in runs:
                parts = part_states(run, self.inner.state.get(run.param, {}))
                found += [(bucket, piece, part) for piece, part in zip(run.pieces, parts, strict=True)]
        return found

    @property
    def state_bytes(self) -> int:
        """The size of this rank's state: its tensors, small ones included."""
        tensors = [v for state in self.inner.state.values() for v in state.values() if isinstance(v, Tensor)]
        return sum(tensor.nbytes for tensor in tensors)

    def gather_gradients(self) -> None:
        """`param.grad` is whole where it was a slice.

        Ranks: all, after the same backwards.
        """
        for bucket, work in [(bucket, bucket.gather_gradients()) for bucket in self.buckets]:
            if work is not None:
                work.wait()
                bucket.take_whole_gradients()

    # One update

    def update(self, step: Callable[[], Any]) -> None:
        """This rank's slices are updated by `step()`, the inner optimizer's, and sent to all.

        Ranks: all, after the same gradients.
        """
        buckets = [i for i, bucket in enumerate(self.buckets) if bucket.has_gradients()]
        for i in buckets:
            self.buckets[i].adopt()
        for i, runs in enumerate(self._runs):
            self._runs[i] = self._with_gradients(runs)
        self._show_inner(range(len(self.buckets)))
        works = []
        if self._one_by_one:
            for i in buckets:
                self._show_inner([i])
                step()
                works.append(self._send(i))
            self._show_inner(range(len(self.buckets)))
        else:
            step()
            works = [self._send(i) for i in buckets]
        for runs in self._runs:
            for run in runs:
                run.param.grad = None
        for work in works:
            if work is not None:
                work.wait()
        for i in buckets:
            torch.autograd.graph.increment_version(self.buckets[i].parameters)

    def _send(self, index: int) -> Any:
        if self._group.size() == 1:
            return None
        bucket = self.buckets[index]
        return collectives.gather_slices(bucket.buffer, bucket.layout.cuts, self._group)

    def _with_gradients(self, runs: list[Run]) -> list[Run]:
        """The runs, each with its gradient or none; one of which only some pieces have any is split."""
        result = []
        for run in runs:
            found = run.take_gradients()
            if all(found) or not any(found):
                result.append(run)
            else:
                result += self._split(run, found)
        return result

    def _split(self, run: Run, found: Sequence[bool]) -> list[Run]:
        parts = part_states(run, self.inner.state.pop(run.param, {}))
        first = 0
        result = []
        for i in range(1, len(found) + 1):
            if i < len(found) and found[i] == found[first]:
                continue
            part = Run(run.bucket, run.group, run.pieces[first:i])
            if parts[first]:
                self.inner.state[part.param] = joined_state(part, parts[first:i])
            part.param.grad = part.gradient if found[first] else None
            result.append(part)
            first = i
        return result

    def _show_inner(self, buckets: Sequence[int]) -> None:
        """The inner optimizer's groups hold the runs of these buckets."""
        for g, param_group in enumerate(self.inner.param_groups):
            param_group["params"] = self._params_of(g, buckets)

    def _params_of(self, group: int, buckets: Sequence[int] | None = None) -> list[nn.Parameter]:
        chosen = range(len(self._runs)) if buckets is None else buckets
        return [run.param for i in chosen for run in self._runs[i] if run.group == group]


def _options(param_group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in param_group.items() if key not in _NOT_OPTIONS}
