from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data import WeightedSampler
from samestep.data.keyed import key_of, uniform, word, words
from samestep.data.orders import Weighted, _minus_log
from samestep.errors import DataError


def sampler(weights: Any, *args: Any, size: int = 1, rank: int = 0, **options: Any) -> WeightedSampler:
    return WeightedSampler(weights, *args, num_replicas=size, rank=rank, **options)


def z_of_chi_squared(counts: np.ndarray, expected: np.ndarray) -> float:
    freedom = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def test_draws_follow_the_weights() -> None:
    weights = np.array([0.0, 1.0, 2.0, 0.0, 3.5, 0.01, 10.0, 0.0])
    drawn = np.bincount(list(sampler(weights, 200_000, seed=1)), minlength=len(weights))
    likely = weights > 0
    assert not drawn[~likely].any()
    expected = weights[likely] / weights.sum() * 200_000
    assert abs(z_of_chi_squared(drawn[likely], expected)) < 3


def test_draws_of_neighbouring_positions_and_epochs_are_independent() -> None:
    orders = Weighted([1.0] * 64, 50_000, replacement=True, seed=2)
    here = orders.of(0)(np.arange(50_000, dtype=np.uint64))
    there = orders.of(1)(np.arange(50_000, dtype=np.uint64))
    for left, right in ((here[:-1], here[1:]), (here, there)):
        counts = np.histogram2d(left, right, bins=16)[0].ravel()
        assert abs(z_of_chi_squared(counts, np.full(256, len(left) / 256))) < 4


@pytest.mark.parametrize("seed", range(3))
def test_without_replacement_the_first_draw_follows_the_weights_and_none_comes_twice(seed: int) -> None:
    weights = [1.0, 0.0, 2.0, 5.0]
    firsts = np.zeros(4)
    for epoch in range(1000):
        order = Weighted(weights, 3, replacement=False, seed=seed).of(epoch)
        drawn = order(np.arange(3, dtype=np.uint64)).tolist()
        assert sorted(drawn) == [0, 2, 3]
        firsts[drawn[0]] += 1
    expected = np.array([1, 2, 5]) / 8 * 1000
    assert abs(z_of_chi_squared(firsts[[0, 2, 3]], expected)) < 3.5


@settings(deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=20).filter(any),
    num=st.integers(1, 30),
    size=st.integers(1, 4),
    replacement=st.booleans(),
)
def test_the_ranks_share_one_sequence_of_draws(
    weights: list[float], num: int, size: int, replacement: bool
) -> None:
    num = num if replacement else min(num, sum(w > 0 for w in weights))
    whole = list(sampler(weights, num, replacement, seed=3))
    options: dict[str, Any] = {"size": size, "seed": 3, "mode": "exact"}
    shares = [list(sampler(weights, num, replacement, rank=rank, **options)) for rank in range(size)]
    assert [shares[p % size][p // size] for p in range(num)] == whole
    assert all(weights[index] > 0 for index in whole)


def test_it_resumes_in_mid_epoch_at_another_number_of_ranks() -> None:
    weights = torch.arange(10.0)
    whole = list(sampler(weights, 20, seed=1))
    first = [sampler(weights, 20, seed=1, size=2, rank=rank) for rank in range(2)]
    iterators = [iter(each) for each in first]
    seen = [next(iterators[p % 2]) for p in range(8)]
    state = json.loads(json.dumps(first[0].state_dict()))
    second = [sampler(weights, 20, seed=1, size=3, rank=rank) for rank in range(3)]
    for each in second:
        each.load_state_dict(state)
    iterators = [iter(each) for each in second]
    assert seen + [next(iterators[p % 3]) for p in range(12)] == whole
    with pytest.raises(DataError, match="its draws are others"):
        sampler(weights + 1, 20, seed=1).load_state_dict(state)
    with pytest.raises(DataError, match="its draws are others"):
        sampler(weights, 9, False, seed=1).load_state_dict(state)


def test_known_draws() -> None:
    # As for permutations: never edit these values without raising permutation.VERSION.
    assert list(sampler([1, 2, 3, 4], 12)) == [1, 3, 2, 3, 2, 2, 2, 3, 2, 2, 3, 3]
    assert list(sampler([1, 2, 3, 4, 5, 6], replacement=False)) == [3, 1, 4, 5, 2, 0]
    assert word(key_of("test", 1, -2), 3) == 6619128133590639206


def test_words_in_bulk_are_the_words_one_by_one() -> None:
    key = key_of("test", 5)
    numbers = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    assert words(key, numbers).tolist() == [word(key, int(n)) for n in numbers]
    values = uniform(key, np.arange(100_000, dtype=np.uint64))
    assert 0 <= values.min() < values.max() < 1
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    assert abs(z_of_chi_squared(counts, np.full(100, 1000.0))) < 3


def test_the_logarithm() -> None:
    draws = uniform(1, np.arange(1000, dtype=np.uint64)) + 2.0**-54
    values = np.concatenate([draws, [2.0**-54, 0.5, 1 - 2.0**-53]])
    np.testing.assert_allclose(_minus_log(values), -np.log(values), rtol=1e-14, atol=1e-17)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, -1.0],), "weight 1 is -1.0"),
        (([1.0, float("nan")],), "weight 1 is nan"),
        (([1e308, 1e308],), "the sum of the weights is infinite"),
        (([0.0, 0.0],), "all weights are 0"),
        (([],), r"weights of shape \[0\]"),
        (([[1.0]],), r"weights of shape \[1, 1\]"),
        (([1.0], 0), "num_samples=0"),
        (([1.0, 0.0, 1.0], 3, False), "only 2 weights are above 0"),
    ],
)
def test_bad_weights(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        sampler(*arguments)
