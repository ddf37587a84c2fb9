"""The promise: a run's bits do not depend on how many processes play it. A part of `make sameness`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .runs import Digests, changing_digests, digests_of
from .training import Case

PART = [
    Case("mlp", "sgd", "bfloat16", 4),
    Case("conv", "adamw", "float32", 4),
    Case("transformer", "adamw", "float32", 4),
    Case("transformer", "sgd", "bfloat16", 8),
]


@pytest.fixture(scope="module")
def alone() -> Digests:
    return digests_of(PART, 1, "gloo")


def test_each_step_changes_the_bits(alone: Digests) -> None:
    for digests in alone.values():
        assert len(set(digests)) == len(digests)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("num_ranks", "backend"), [(3, "gloo"), (4, "gloo"), (2, "shm")])
def test_equal_bits_after_every_step(alone: Digests, num_ranks: int, backend: str) -> None:
    # The negative control rides along: four ranks' gradients in the backend's own order.
    plain = replace(PART[2], deterministic=False)
    found = digests_of([*PART, plain] if num_ranks == 4 else PART, num_ranks, backend)
    if num_ranks == 4:
        assert found.pop(plain) != alone[PART[2]]
    assert found == alone


@pytest.mark.timeout(180)
def test_equal_bits_where_the_number_of_processes_changes_at_checkpoints(alone: Digests) -> None:
    part = PART[1:3]
    assert changing_digests(part, [4, 2, 3, 1], "gloo") == {case: alone[case] for case in part}
