from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.data.permutation import Permutation
from samestep.errors import DataError


def order_of(length: int, *, seed: int = 0, epoch: int = 0, stop: int | None = None) -> list[int]:
    positions = np.arange(length if stop is None else stop, dtype=np.uint64)
    return Permutation(length, seed=seed, epoch=epoch)(positions).tolist()


def z_of_chi_squared(counts: np.ndarray, freedom: int) -> float:
    """How many standard deviations the chi-squared statistic of `counts` lies from its mean."""
    expected = counts.sum() / counts.size
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def z_of_runs(sequence: np.ndarray) -> float:
    """How many standard deviations the number of runs up and down lies from a random sequence's."""
    rising = np.diff(sequence) > 0
    num_runs = 1 + np.count_nonzero(rising[1:] != rising[:-1])
    n = len(sequence)
    return float((num_runs - (2 * n - 1) / 3) / np.sqrt((16 * n - 29) / 90))


@pytest.mark.parametrize("length", [*range(1, 70), 255, 256, 257, 4095, 4096, 4097, 4098, 4099])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_index_comes_once(length: int, seed: int) -> None:
    assert sorted(order_of(length, seed=seed)) == list(range(length))


@pytest.mark.parametrize("length", [2**16 - 1, 2**16, 2**16 + 1, 99_991, 2**20])
def test_every_index_comes_once_in_long_orders(length: int) -> None:
    seen = np.zeros(length, dtype=np.int64)
    np.add.at(seen, order_of(length, seed=7, epoch=3), 1)
    assert np.all(seen == 1)


@given(length=st.integers(4097, 20_000), seed=st.integers(), epoch=st.integers())
def test_every_index_comes_once_whatever_the_key(length: int, seed: int, epoch: int) -> None:
    assert np.unique(order_of(length, seed=seed, epoch=epoch)).size == length


@pytest.mark.parametrize("length", [10**9, 2**32, 2**32 + 1, 2**40 - 87, 2**62])
def test_indices_of_huge_orders_are_distinct_and_in_range(length: int) -> None:
    permutation = Permutation(length, seed=1, epoch=2)
    ends = np.arange(50_000, dtype=np.uint64)
    positions = np.concatenate([ends, np.uint64(length) - np.uint64(1) - ends])
    indices = permutation(positions)
    assert np.unique(indices).size == positions.size
    assert indices.min() >= 0
    assert indices.max() < length


def test_the_order_does_not_depend_on_how_it_is_asked_for() -> None:
    permutation = Permutation(5000, seed=3, epoch=4)
    positions = np.array([17, 4999, 0, 17], dtype=np.uint64)
    order = order_of(5000, seed=3, epoch=4)
    assert permutation(positions).tolist() == [order[17], order[4999], order[0], order[17]]
    assert positions.tolist() == [17, 4999, 0, 17]
    assert permutation(positions[:0]).tolist() == []


def test_known_orders() -> None:
    # A run resumed on another machine, Python or numpy must see the same order: never edit these values
    # without raising permutation.VERSION.
    assert order_of(10) == [6, 2, 4, 7, 9, 5, 3, 1, 8, 0]
    assert order_of(10, seed=0, epoch=1) == [2, 0, 1, 7, 3, 9, 8, 5, 6, 4]
    assert order_of(1000, seed=-5, epoch=2, stop=6) == [958, 749, 37, 734, 359, 943]
    assert order_of(60_000, seed=42, epoch=7, stop=6) == [11050, 39622, 21638, 24397, 53465, 38605]
    assert order_of(10**9, seed=2**80, stop=5) == [784328404, 979938572, 573747467, 56479602, 983421928]
    assert order_of(2**62, stop=3) == [429950038592544210, 4406935064333145561, 1618870538995082308]


def test_seed_and_epoch_are_not_exchangeable() -> None:
    orders = {tuple(order_of(100, seed=seed, epoch=epoch)) for seed in range(6) for epoch in range(6)}
    assert len(orders) == 36


def test_all_orders_of_five_are_equally_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(6000):
        order = tuple(order_of(5, epoch=epoch))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 120
    assert abs(z_of_chi_squared(np.array(list(counts.values())), 119)) < 3


@pytest.mark.parametrize("length", [1000, 4097, 10_007])
@pytest.mark.parametrize("position", [0, 1, 999])
def test_each_position_takes_every_index_equally_often(length: int, position: int) -> None:
    where = np.array([position], dtype=np.uint64)
    indices = [int(Permutation(length, seed=5, epoch=e)(where)[0]) for e in range(2000)]
    counts = np.histogram(indices, bins=40, range=(0, length))[0]
    assert abs(z_of_chi_squared(counts, 39)) < 3.5


@pytest.mark.parametrize("length", [4000, 4097, 65_536, 10**6, 10**9])
@pytest.mark.parametrize("seed", range(4))
def test_no_order_is_left_in_an_epoch(length: int, seed: int) -> None:
    num = min(length, 50_000)
    order = np.array(order_of(length, seed=seed, stop=num), dtype=np.float64)
    assert abs(z_of_runs(order)) < 4
    # The index says nothing about its position, nor about the next index.
    where = np.histogram2d(np.arange(num), order, bins=8, range=((0, num), (0, length)))[0]
    freedom = 56 if length > num else 49  # the counts per index range are fixed in a whole order
    if not num < length < 4 * num:
        assert abs(z_of_chi_squared(where, freedom)) < 4
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) * np.sqrt(num) < 4
    following = np.array(order_of(length, seed=seed, epoch=1, stop=num), dtype=np.float64)
    assert abs(np.corrcoef(order, following)[0, 1]) * np.sqrt(num) < 4


def test_those_statistics_reject_an_order_that_is_not_random() -> None:
    length = 10**6
    step = 618_034 + 1  # a Weyl sequence: evenly spread, and nothing like random
    weyl = (np.arange(50_000) * step % length).astype(np.float64)
    assert abs(z_of_runs(weyl)) > 10
    assert z_of_chi_squared(np.histogram(weyl, bins=40)[0], 39) < -4


def test_a_billion_items_start_in_under_a_megabyte() -> None:
    Permutation(10**9, seed=0, epoch=0)(np.arange(2, dtype=np.uint64))  # what is made only once
    tracemalloc.start()
    try:
        permutation = Permutation(10**9, seed=0, epoch=1)
        permutation(np.arange(8192, dtype=np.uint64))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [0, -1, 2**62 + 1])
def test_lengths_out_of_range(length: int) -> None:
    with pytest.raises(DataError, match=rf"cannot shuffle {length} items"):
        Permutation(length, seed=0, epoch=0)
