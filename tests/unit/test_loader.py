from __future__ import annotations

import json
import multiprocessing
import random
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import RandomSampler, Subset, TensorDataset

from samestep.data import DistributedSampler
from samestep.data.orders import Shuffled
from tests.loading import AtOnce, Augmented, loaders, merged, noisy_collate, plain, turns_of

SIZES: dict[str, Any] = {
    "length": st.integers(1, 70),
    "virtual_size": st.integers(1, 7),
    "batch_size": st.integers(1, 5),
    "accumulation": st.integers(1, 3),
    "mode": st.sampled_from(["exact", "pad", "drop"]),
}

WORKERS: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "forkserver"}


def samples_of(turns: list[tuple[Any, ...]]) -> list[Any]:
    """The turns with the columns of their batches as lists."""
    return [(*turn[:4], [plain(column) for column in turn[4]]) for turn in turns]


def counted(turns: list[tuple[Any, ...]]) -> list[int]:
    """The samples that count, in the order of the turns."""
    return [index for *_, weight, batch in turns for index in batch if weight]


def fits(length: int, virtual_size: int, batch_size: int, accumulation: int, mode: str) -> bool:
    return mode != "drop" or length >= virtual_size * batch_size * accumulation


@settings(deadline=None, max_examples=50)
@given(
    **SIZES,
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    steps=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_an_epoch_is_the_data_set_whoever_plays_it_and_wherever_it_was_resumed(
    length: int,
    virtual_size: int,
    batch_size: int,
    accumulation: int,
    mode: Any,
    sizes: list[int],
    steps: int,
    shuffle: bool,
) -> None:
    if not fits(length, virtual_size, batch_size, accumulation, mode):
        return
    options = {"mode": mode, "accumulation": accumulation, "shuffle": shuffle, "seed": 3}
    whole = turns_of(loaders(range(length), 1, virtual_size, batch_size, **options)[0])
    state = None
    seen = []
    for phase, size in enumerate(sizes):
        ranks = loaders(range(length), min(size, virtual_size), virtual_size, batch_size, **options)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        is_last = phase == len(sizes) - 1
        if ranks[0].epoch == 0 and (steps or is_last):
            seen += merged([turns_of(loader, None if is_last else steps) for loader in ranks])
        states = [json.loads(json.dumps(loader.state_dict())) for loader in ranks]
        state = states[0]
        assert all(other == state for other in states)
    assert seen == whole
    assert (state["epoch"], state["num_consumed"]) == (1, 0)

    counts = Counter(counted(whole))
    num_steps = len({turn[0] for turn in whole})
    global_batch = virtual_size * batch_size * accumulation
    if mode == "drop":
        assert set(counts.values()) == {1}
        assert len(counts) == length // global_batch * global_batch
    else:
        assert set(counts) == set(range(length))
        assert counts.total() - length < (virtual_size if mode == "pad" else 1)
        assert num_steps == -(-length // global_batch)


@settings(deadline=None)
@given(**SIZES)
def test_weights_make_the_step_the_mean_of_its_samples(
    length: int, virtual_size: int, batch_size: int, accumulation: int, mode: Any
) -> None:
    if not fits(length, virtual_size, batch_size, accumulation, mode):
        return
    [loader] = loaders(range(length), 1, virtual_size, batch_size, mode=mode, accumulation=accumulation)
    steps: dict[Any, list[tuple[Any, ...]]] = {}
    for turn in turns_of(loader):
        steps.setdefault(turn[0], []).append(turn)
    assert len(loader) == len(steps)
    for turns in steps.values():
        samples = [index for *_, weight, batch in turns for index in batch if weight]
        mean_of_means = sum(weight * sum(batch) / len(batch) for *_, weight, batch in turns) / virtual_size
        assert mean_of_means == pytest.approx(sum(samples) / len(samples))
        assert sum(turn[3] for turn in turns) == pytest.approx(virtual_size)
        assert len({turn[1] for turn in turns}) == virtual_size
        assert len({turn[2] for turn in turns}) * virtual_size == len(turns)
        lengths = [len(batch) for *_, batch in turns]
        assert max(lengths) - min(lengths) <= 1
        if len(samples) == virtual_size * batch_size * accumulation:
            assert {turn[3] for turn in turns} == {1 / accumulation}


def test_full_steps_are_dealt_as_distributed_sampler_deals() -> None:
    for rank, loader in enumerate(loaders(range(43), 3, None, 4, shuffle=True, seed=5)):
        sampler = DistributedSampler(range(43), 3, rank, seed=5, mode="exact")
        theirs = [plain(batch) for batch in TorchLoader(range(43), 4, sampler=sampler)]  # type: ignore[arg-type]
        assert [plain(batch) for batch in loader] == theirs


def test_a_step_with_fewer_samples_than_virtual_ranks_is_filled_with_a_sample_that_does_not_count() -> None:
    [loader] = loaders(range(9), 1, 4, 2)
    last = [turn for turn in turns_of(loader) if turn[0] == (0, 8)]
    assert [(position, weight, batch) for _, position, _, weight, batch in last] == [
        (0, 4.0, [8]),
        (1, 0.0, [8]),
        (2, 0.0, [8]),
        (3, 0.0, [8]),
    ]


def test_the_form_of_the_loop_depends_on_the_script_alone() -> None:
    data = TensorDataset(torch.arange(12), torch.arange(12) * 10)
    for loader in loaders(data, 2, None, 3):
        for x, y in loader:
            assert y.tolist() == [value * 10 for value in x.tolist()]
    for size in (1, 2):
        for loader in loaders(data, size, 2, 3):
            steps = list(loader)
            assert [len(step) for step in steps] == [2 // size] * 2
            assert [step.num_samples for step in steps] == [6, 6]
    for loader in loaders(data, 2, None, 3, accumulation=2):
        assert [len(list(step)) for step in loader] == [2]


def test_epochs_advance_and_set_epoch_says_which_comes_next() -> None:
    [loader] = loaders(range(20), 1, 2, 5, shuffle=True)
    orders = [counted(turns_of(loader)) for _ in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert loader.epoch == 2
    loader.set_epoch(1)
    assert loader.epoch == 1
    assert counted(turns_of(loader)) == orders[1]
    assert counted(turns_of(loader)) == orders[2]
    loader.set_epoch(0)
    turns_of(loader, 1)
    state = loader.state_dict()
    for epoch, num_steps in ((0, 1), (1, 2)):
        [resumed] = loaders(range(20), 1, 2, 5, shuffle=True)
        resumed.load_state_dict(state)
        assert (resumed.epoch, len(resumed)) == (0, 1)
        resumed.set_epoch(epoch)
        assert len(resumed) == len(list(resumed)) == num_steps


def test_the_order_is_that_of_the_permutation() -> None:
    [loader] = loaders(range(5000), 1, 3, 100, shuffle=True, seed=11)
    order = Shuffled(5000, 11).of(0)(np.arange(5000, dtype=np.uint64)).tolist()
    for (_, position), virtual_rank, _, _, batch in turns_of(loader):
        assert batch == order[position + virtual_rank : position + 300 : 3]


def test_the_samples_before_and_after_a_batch_size_has_changed_are_the_data_set() -> None:
    [first] = loaders(range(30), 1, 2, 3, shuffle=True)
    seen = counted(turns_of(first, 2))
    [second] = loaders(range(30), 1, 2, 5, shuffle=True)
    second.load_state_dict(first.state_dict())
    assert sorted(seen + counted(turns_of(second))) == list(range(30))


def test_a_billion_samples_start_in_under_a_megabyte() -> None:
    [loader] = loaders(range(10**9), 1, 8, 32, shuffle=True)
    for _ in loader:  # what is made only once
        break
    tracemalloc.start()
    try:
        for step in loader:
            assert len(step) == 8
            break
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


# Random streams


@pytest.mark.parametrize("dataset", [Augmented(21), AtOnce(21), Subset(Augmented(40), range(5, 26))])
def test_what_samples_draw_depends_on_seed_epoch_and_sample_alone(dataset: Any) -> None:
    options: dict[str, Any] = {"collate_fn": noisy_collate, "shuffle": True}
    [one] = loaders(dataset, 1, 3, 2, **options)
    epochs = [turns_of(one), turns_of(one)]
    several = loaders(dataset, 2, 3, 2, **options)
    torch.rand(5)
    assert [merged([turns_of(loader) for loader in several]) for _ in range(2)] == epochs
    draws = [draw for turns in epochs for *_, batch in turns for draw in (*batch[1:], *batch[0])]
    assert len({str(draw) for draw in draws}) == len(draws)
    several = loaders(dataset, 1, 3, 2, **options, seed=1)
    assert turns_of(several[0]) != epochs[0]


def test_an_augmentation_does_not_depend_on_how_the_sample_was_batched() -> None:
    [one], [other] = loaders(Augmented(12), 1, 1, 1, shuffle=True), loaders(Augmented(12), 1, 2, 5)
    ours, theirs = (
        {row[0]: row for *_, batch in turns_of(loader) for row in zip(*map(plain, batch), strict=True)}
        for loader in (one, other)
    )
    assert ours == theirs


def test_loading_leaves_the_scripts_random_streams_alone() -> None:
    def draw() -> tuple[float, ...]:
        return torch.rand(()).item(), float(np.random.normal()), random.gauss(0, 1)

    def seed() -> None:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)

    seed()
    undisturbed = [draw() for _ in range(4)]
    for sampler in (None, RandomSampler(range(8))):  # type: ignore[arg-type]
        seed()
        first = [draw()]
        [loader] = loaders(Augmented(8), 1, None, 3, sampler=sampler)
        assert first + [draw() for _ in loader] == undisturbed


def test_persistent_workers_load_the_same_and_a_run_resumes_behind_their_backs() -> None:
    options: dict[str, Any] = {"shuffle": True, "collate_fn": noisy_collate}
    workers = {**WORKERS, "num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}
    [alone] = loaders(Augmented(50), 1, 2, 3, **options)
    epochs = [turns_of(alone), turns_of(alone)]
    [loader] = loaders(Augmented(50), 1, 2, 3, **options, **workers)
    assert [turns_of(loader), turns_of(loader)] == epochs
    loader.set_epoch(0)
    begun = turns_of(loader, 3)
    state = loader.state_dict()
    assert state["num_consumed"] == 18
    loader.load_state_dict(state)
    assert begun + turns_of(loader) == epochs[0]
    assert turns_of(loader) == epochs[1]


def test_workers_end_with_the_loop_that_was_left_and_steps_may_outlive_it() -> None:
    [loader] = loaders(Augmented(20), 1, 2, 3, shuffle=True, **WORKERS)
    before = set(multiprocessing.active_children())
    for _ in loader:
        working = set(multiprocessing.active_children()) - before
        assert len(working) == 1
        break
    del _
    assert not set(multiprocessing.active_children()) & working
    step = next(iter(loader))
    assert len(list(step)) == 2
    del step
    assert not set(multiprocessing.active_children()) - before


def test_a_worker_for_one_epoch_reads_ahead_and_a_run_resumes_without_it() -> None:
    [first] = loaders(Augmented(20), 1, 2, 3, shuffle=True, **WORKERS)
    begun = samples_of(turns_of(first, 2))
    rest = loaders(Augmented(20), 2, 2, 3, shuffle=True)
    for loader in rest:
        loader.load_state_dict(first.state_dict())
    resumed = samples_of(merged([turns_of(loader) for loader in rest]))
    [alone] = loaders(Augmented(20), 1, 2, 3, shuffle=True)
    assert begun + resumed == samples_of(turns_of(alone))


def test_streams_of_samples_can_be_left_out() -> None:
    def drawn(**options: Any) -> list[float]:
        [loader] = loaders(Augmented(6), 1, 1, 3, **options)
        torch.manual_seed(7)
        return [number for *_, batch in turns_of(loader) for number in plain(batch[1])]

    torch.manual_seed(7)
    scripts = [torch.rand(()).item() for _ in range(6)]
    assert drawn(sample_streams=False) == scripts
    assert drawn() != scripts
