"""Every argument of torch's class, in its order and with its default, and the methods that scripts call."""

from __future__ import annotations

import inspect

import torch

import samestep

THEIRS = torch.nn.parallel.DistributedDataParallel


def test_the_constructor_takes_what_torchs_takes() -> None:
    theirs = list(inspect.signature(THEIRS.__init__).parameters.values())
    ours = list(inspect.signature(samestep.DistributedDataParallel.__init__).parameters.values())
    pairs = [(p.name, p.default, p.kind) for p in ours[: len(theirs)]]
    assert pairs == [(p.name, p.default, p.kind) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_public_methods_are_there_with_their_arguments() -> None:
    for name in ("forward", "no_sync", "join", "join_hook", "register_comm_hook"):
        theirs = inspect.signature(getattr(THEIRS, name)).parameters
        ours = inspect.signature(getattr(samestep.DistributedDataParallel, name)).parameters
        assert list(ours) == list(theirs), name


def test_samplers_take_the_same() -> None:
    theirs = list(inspect.signature(torch.utils.data.DistributedSampler.__init__).parameters.values())
    ours = list(inspect.signature(samestep.DistributedSampler.__init__).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
