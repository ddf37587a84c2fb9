"""What the reducer refuses to do, and how it says so: the errors, and the checks before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from samestep.errors import GradientError
from samestep.gradients.bucket import Slot
from samestep.gradients.rides import MOST_ITEMS
from samestep.virtual import Turn, VirtualRanks

__all__ = [
    "abandoned",
    "check_fresh",
    "check_grad_of_parameters",
    "check_items",
    "drop_stale",
    "graph_changed",
    "late",
    "left_unsynchronised",
    "needs_one_virtual_rank",
    "nobody_plays",
    "nothing_counted",
    "out_of_turn",
]

_MOST_NAMES = 5


def check_fresh(slots: Sequence[Slot], reduction: str) -> None:
    """Return if no sum over ranks would take in a gradient that is the same on all of them already."""
    for slot, gradient in _untouched(slots):
        if gradient.any():
            raise GradientError(
                f"{slot.name} still has the gradient of the last synchronised backward, which "
                f'reduction="{reduction}" would count once per rank: call optimizer.zero_grad()'
            )


def drop_stale(slots: Sequence[Slot]) -> None:
    """No parameter has a gradient of the step before, in which virtual ranks would differ from each other.

    Zeros (`zero_grad(set_to_none=False)`) go; anything else is refused.
    """
    for slot, gradient in _untouched(slots):
        if gradient.any():
            raise GradientError(
                f"{slot.name} still has the gradient of the step before, in which all virtual ranks had "
                "their part: call optimizer.zero_grad() after each step"
            )
        slot.param.grad = None


def _untouched(slots: Sequence[Slot]) -> Iterator[tuple[Slot, Tensor]]:
    """Those whose gradient is what the last synchronised backward left, and that gradient."""
    for slot in slots:
        gradient = slot.param.grad
        if not slot.used and gradient is not None and gradient is slot.view:
            yield slot, gradient


def check_items(reduction: str, items: int, counted: int) -> None:
    """Return if `items` more than the `counted` ones can be counted."""
    if reduction != "weighted":
        raise GradientError(
            f'items were counted, but reduction is "{reduction}": wrap the model with reduction="weighted"'
        )
    if items < 0 or counted + items > MOST_ITEMS:
        raise GradientError(f"a count of {items} items: it must be from 0 to 2**48 - 1 in all")


def check_grad_of_parameters(synchronise: bool) -> None:
    """Return if `torch.autograd.grad` by parameters is meant to be this rank's alone."""
    if synchronise and not torch.is_grad_enabled():
        raise GradientError(
            "torch.autograd.grad of parameters gives the gradient of this rank's data alone: call "
            "loss.backward() for the average, or do it under no_sync() if that is what you mean"
        )


def nothing_counted() -> GradientError:
    """A weighted mean over nothing."""
    return GradientError(
        'reduction="weighted", but no rank counted any items in this step: call '
        "model.weigh(loss, items) or model.count_items(items) for each micro-batch"
    )


def abandoned(num_ranks: int, rank: int) -> GradientError:
    """Other ranks raised in the middle of this backward and have gone on."""
    return GradientError(
        f"rank {rank}: {num_ranks} other rank(s) gave up in the middle of this backward (their own error "
        "says why): its gradients were dropped"
    )


def late(slot: Slot, rank: int) -> GradientError:
    """A gradient came after its bucket had gone out: see [Note: Firing more than once] in reducer.py."""
    return GradientError(
        f"rank {rank}: the gradient of {slot.name} grew after it had been reduced: a re-entrant checkpoint "
        "used it again, which no backward before this one did. Use checkpoint(..., use_reentrant=False)"
    )


def graph_changed(slots: Sequence[Slot], before: Sequence[int], now: Sequence[int]) -> GradientError:
    """`static_graph=True` was a promise, and it was broken."""
    changed = [
        f"{slot.name} ({was} -> {is_now} times)"
        for slot, was, is_now in zip(slots, before, now, strict=True)
        if was != is_now
    ]
    more = " ..." if len(changed) > _MOST_NAMES else ""
    return GradientError(
        "Your training graph has changed in this iteration, which static_graph=True promised it would not: "
        f"gradients fired differently for {', '.join(changed[:_MOST_NAMES])}{more}. Drop static_graph"
    )


def nobody_plays(virtual: VirtualRanks) -> GradientError:
    """A process that plays several virtual ranks does not know whose gradient this is."""
    start, stop = virtual.block
    return GradientError(
        f"this process plays virtual ranks {start}..{stop - 1} of {virtual.virtual_size}, and a backward ran "
        "outside of their turns: take batches from samestep's loader (`for step in loader: for batch in "
        "step`) or say whose it is, `with world.virtual.play(...)`"
    )


def out_of_turn(turn: Turn, missing: tuple[int, int]) -> GradientError:
    """A backward too many or too few."""
    if missing > (turn.position, turn.micro_batch):
        return GradientError(
            f"a second synchronised backward through this model in the turn of virtual rank {turn.position}, "
            f"step {turn.step}: run all but the last one under model.no_sync()"
        )
    return GradientError(
        f"virtual rank {missing[0]}, micro-batch {missing[1]}, has had its turn without a synchronised "
        f"backward through this model, and now it is virtual rank {turn.position}'s, step {turn.step}: each "
        "turn needs one (the gradients of the step so far are dropped)"
    )


def left_unsynchronised(virtual: VirtualRanks) -> GradientError:
    """Gradients accumulated under no_sync() would run over into another virtual rank's."""
    return GradientError(
        "gradients accumulated under no_sync() were left when the next virtual rank's turn began (this "
        f"process plays {virtual.block.stop - virtual.block.start} of them): synchronise the last backward "
        "of each turn, or let the loader accumulate"
    )


def needs_one_virtual_rank(what: str, virtual: VirtualRanks) -> GradientError:
    """Something that cannot be done with partial sums."""
    return GradientError(
        f"{what} needs a process per virtual rank: this one plays virtual ranks {virtual.block.start}.."
        f"{virtual.block.stop - 1} of {virtual.virtual_size}, so start {virtual.virtual_size} processes"
    )
