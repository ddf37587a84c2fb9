"""The loader over samplers, batch samplers and streams; evaluation; what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, Sampler, Subset, WeightedRandomSampler
from torch.utils.data import DataLoader as TorchLoader

from samestep.data import DataLoader, DistributedSampler, WeightedSampler
from samestep.errors import DataError, WorldError
from samestep.virtual import VirtualRanks, virtual_ranks
from samestep.world import World
from tests.loading import (
    Augmented,
    Numbers,
    Resumable,
    as_list,
    group_of,
    loaders,
    merged,
    plain,
    turns_of,
)

WORKERS: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "forkserver"}


def counted(turns: list[tuple[Any, ...]]) -> list[int]:
    return [index for *_, weight, batch in turns for index in batch if weight]


def weighted_sampler() -> Any:
    return WeightedSampler([1.0, 2.0, 3.0] * 5, 40, seed=2, num_replicas=1, rank=0)


SAMPLERS = {
    "ours": weighted_sampler,
    "torch's weighted": lambda: WeightedRandomSampler([1.0, 2.0, 3.0] * 5, 40),
    "with a generator": lambda: RandomSampler(range(15), generator=torch.Generator().manual_seed(4)),  # type: ignore[arg-type]
    "a list": lambda: [5, 5, 2, 0, 7, 9, 14, 3, 3, 3, 1, 8, 8],
}


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("mode", ["exact", "pad", "drop"])
def test_all_processes_take_from_one_sequence_of_a_sampler_and_resume_in_it(kind: str, mode: Any) -> None:
    def made(size: int) -> list[DataLoader]:
        options = {"sampler": SAMPLERS[kind](), "mode": mode, "accumulation": 2}
        return loaders(Augmented(15), size, 3, 1, **options, seed=6)

    def samples(turns: list[tuple[Any, ...]]) -> Any:
        return [(*turn[:4], [plain(column) for column in turn[4]]) for turn in turns]

    [alone] = made(1)
    epochs = [samples(turns_of(alone)), samples(turns_of(alone))]
    assert epochs[0] != epochs[1]  # in what they draw at least
    begun = made(2)
    seen = samples(merged([turns_of(loader, 1) for loader in begun]))
    state = json.loads(json.dumps(begun[0].state_dict()))
    rest = made(3)
    for loader in rest:
        loader.load_state_dict(state)
    assert seen + samples(merged([turns_of(loader) for loader in rest])) == epochs[0]
    assert samples(merged([turns_of(loader) for loader in rest])) == epochs[1]


def test_weighted_draws_are_those_of_the_sampler() -> None:
    [loader] = loaders(range(15), 1, 2, 3, sampler=weighted_sampler())
    draws = list(weighted_sampler())
    assert sorted(counted(turns_of(loader))) == sorted(draws)
    assert turns_of(loaders(range(15), 1, 2, 3, sampler=weighted_sampler())[0])[0][4] == draws[0:6:2]


class ByLength(Sampler[Any]):
    """Batches of different lengths, in an order drawn from torch's stream."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(self.num).tolist():
            yield list(range(10 * index, 10 * index + 1 + index % 4))

    def __len__(self) -> int:
        return self.num


@settings(deadline=None, max_examples=25)
@given(
    num=st.integers(1, 15),
    virtual_size=st.integers(1, 4),
    size=st.integers(1, 4),
    accumulation=st.integers(1, 2),
    mode=st.sampled_from(["exact", "pad"]),
)
def test_batches_of_a_batch_sampler_count_by_their_samples(
    num: int, virtual_size: int, size: int, accumulation: int, mode: Any
) -> None:
    options: dict[str, Any] = {"batch_sampler": ByLength(num), "mode": mode, "accumulation": accumulation}
    [alone] = loaders(range(200), 1, virtual_size, **options)
    whole = turns_of(alone)
    several = loaders(range(200), min(size, virtual_size), virtual_size, **options)
    assert merged([turns_of(loader) for loader in several]) == whole
    expected = [index for batch in ByLength(num) for index in batch]
    assert set(counted(whole)) == set(expected)
    if mode == "exact":
        assert sorted(counted(whole)) == sorted(expected)
    for name in {turn[0] for turn in whole}:
        turns = [turn for turn in whole if turn[0] == name]
        samples = [index for *_, weight, batch in turns for index in batch if weight]
        mean_of_means = sum(weight * sum(batch) / len(batch) for *_, weight, batch in turns) / virtual_size
        assert mean_of_means == pytest.approx(sum(samples) / len(samples))


def test_torchs_batch_sampler_resumes() -> None:
    def made() -> DataLoader:
        batches = BatchSampler(RandomSampler(range(23)), 4, drop_last=False)  # type: ignore[arg-type]
        return loaders(range(23), 1, None, batch_sampler=batches)[0]

    first, second = made(), made()
    whole = [plain(batch) for batch in first]
    for number, _ in enumerate(first):
        if number == 2:
            break
    second.load_state_dict(first.state_dict())
    first.load_state_dict(second.state_dict())
    assert [plain(batch) for batch in second] == [plain(batch) for batch in first]
    assert sorted(index for batch in whole for index in batch) == list(range(23))
    assert (len(first), len(second)) == (6, 6)


# Streams


@settings(deadline=None, max_examples=25)
@given(
    length=st.integers(0, 40),
    virtual_size=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    batch_size=st.integers(1, 3),
    accumulation=st.integers(1, 2),
    mode=st.sampled_from(["exact", "pad", "drop"]),
    stateful=st.booleans(),
)
def test_each_sample_of_a_stream_goes_to_one_virtual_rank_by_its_position(
    length: int,
    virtual_size: int,
    sizes: list[int],
    batch_size: int,
    accumulation: int,
    mode: Any,
    stateful: bool,
) -> None:
    options: dict[str, Any] = {"mode": mode, "accumulation": accumulation}
    stored = turns_of(loaders(range(40), 1, virtual_size, batch_size, **options)[0]) if length == 40 else None
    stream = Resumable if stateful else Numbers
    whole = turns_of(loaders(stream(length), 1, virtual_size, batch_size, **options)[0])
    assert stored in (None, whole)
    if mode == "exact":
        assert sorted(counted(whole)) == list(range(length))
    state = None
    seen = []
    for phase, size in enumerate(sizes):
        size = min(size, virtual_size)
        ranks = loaders(lambda: stream(length), size, virtual_size, batch_size, **options)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        if ranks[0].epoch == 0:
            num_steps = 1 if phase < len(sizes) - 1 else None
            seen += merged([turns_of(loader, num_steps) for loader in ranks])
        states = [json.loads(json.dumps(loader.state_dict())) for loader in ranks]
        state = states[0]
        assert all(other == state for other in states)
    assert seen == whole


def test_a_stream_with_a_state_goes_on_without_reading_again() -> None:
    [first] = loaders(Resumable(20), 1, 2, 3)
    turns_of(first, 2)
    dataset = Resumable(20)
    [second] = loaders(dataset, 1, 2, 3)
    second.load_state_dict(first.state_dict())
    turns_of(second)
    assert dataset.was_read == list(range(12, 20))


@pytest.mark.parametrize("dataset", [Numbers(31, noisy=True), Resumable(31)])
def test_workers_read_whole_streams_and_their_state_comes_with_the_step(dataset: Any) -> None:
    options: dict[str, Any] = {"collate_fn": as_list}
    [alone] = loaders(dataset, 1, 2, 3, **options)
    epochs = [turns_of(alone), turns_of(alone)]
    [loader] = loaders(dataset, 1, 2, 3, **options, **WORKERS, persistent_workers=True)
    assert [turns_of(loader), turns_of(loader)] == epochs
    loader.set_epoch(0)
    begun = turns_of(loader, 2)
    state = loader.state_dict()
    assert state["stream"] == ({"position": 12} if isinstance(dataset, Resumable) else None)
    [resumed] = loaders(dataset, 1, 2, 3, **options, **WORKERS)
    resumed.load_state_dict(state)
    assert begun + turns_of(resumed) == epochs[0]
    assert turns_of(resumed) == epochs[1]


def test_anything_iterable_with_a_state_is_a_stream_such_as_a_loader_of_batches() -> None:
    class Batches:
        """As torchdata's StatefulDataLoader: no data set, but iterable, with a state."""

        def __init__(self) -> None:
            self.inner = TorchLoader(range(10), 2)  # type: ignore[arg-type]
            self.number = 0

        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(self.inner):
                if number >= self.number:
                    self.number = number + 1
                    yield batch
            self.number = 0

        def state_dict(self) -> dict[str, int]:
            return {"number": self.number}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.number = state["number"]

    [first] = loaders(Batches(), 1, 2, None)
    begun = turns_of(first, 1)
    assert [turn[4] for turn in begun] == [[0, 1], [2, 3]]
    [second] = loaders(Batches(), 1, 2, None)
    second.load_state_dict(first.state_dict())
    assert [(turn[3], turn[4]) for turn in turns_of(second)] == [
        (1.0, [4, 5]),
        (1.0, [6, 7]),
        (2.0, [8, 9]),
        (0.0, [8, 9]),
    ]


# Evaluation


@settings(deadline=None, max_examples=30)
@given(
    length=st.integers(0, 40),
    size=st.integers(1, 5),
    batch_size=st.integers(1, 6),
    stream=st.booleans(),
)
def test_evaluation_runs_each_sample_once_in_batches_that_do_not_depend_on_the_number_of_processes(
    length: int, size: int, batch_size: int, stream: bool
) -> None:
    dataset = Numbers(length) if stream else range(length)
    ranks = loaders(dataset, size, None, batch_size, mode="evaluate")
    batches = [[plain(batch) for batch in loader] for loader in ranks]
    assert all([plain(batch) for batch in loader] == batches[rank] for rank, loader in enumerate(ranks))
    dealt = [batches[number % size][number // size] for number in range(sum(map(len, batches)))]
    assert dealt == [
        list(range(first, min(first + batch_size, length))) for first in range(0, length, batch_size)
    ]
    rows = [[index for batch in mine for index in batch] for mine in batches]
    assert [places.tolist() for places in ranks[0].rows_by_rank(list(map(len, rows)))] == rows
    if not stream:
        assert [len(loader) for loader in ranks] == list(map(len, batches))
        with pytest.raises(DataError, match="more than it was handed samples"):
            ranks[0].rows_by_rank([len(mine) + 1 for mine in rows])


# What it refuses


def test_a_step_left_in_the_middle_is_an_error_at_the_next_one_and_in_its_state() -> None:
    [loader] = loaders(range(20), 1, 2, 3)
    for step in loader:
        for _ in step:
            break
        break
    middle = "the step at sample 0 of epoch 0 was left after 1 of its 2 batches here"
    with pytest.raises(DataError, match=f"{middle}, and has no state there"):
        loader.state_dict()
    with pytest.raises(DataError, match=f"{middle}, and now another pass begins"):
        next(iter(loader))
    loader.set_epoch(0)
    steps = iter(loader)
    next(iter(next(steps)))
    with pytest.raises(DataError, match=f"{middle}: go through all batches of a step, or none"):
        next(steps)
    loader.set_epoch(0)
    assert len(turns_of(loader)) == 8


def test_a_step_may_be_skipped_and_is_gone_through_once() -> None:
    [loader] = loaders(range(20), 1, 2, 3)
    steps = iter(loader)
    next(steps)
    step = next(steps)
    assert loader.state_dict()["num_consumed"] == 6
    assert [plain(batch) for batch in step] == [[6, 8, 10], [7, 9, 11]]
    assert loader.state_dict()["num_consumed"] == 12
    with pytest.raises(DataError, match="the step at sample 6 of epoch 0 is gone through a second time"):
        list(step)


def test_a_pass_that_another_one_has_replaced_is_over() -> None:
    [loader] = loaders(range(20), 1, None, 3)
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(DataError, match="a pass over epoch 0 goes on after another one has begun"):
        next(first)


def test_more_processes_than_virtual_ranks() -> None:
    with pytest.raises(WorldError, match="virtual_size=2 cannot be played by 3 processes"):
        group_of(0, 3, 2)


def test_a_loader_of_another_world() -> None:
    group = group_of(0, 1, None)
    loader = DataLoader(range(4), process_group=group)
    virtual_ranks(group, attach=VirtualRanks(0, 1, virtual_size=2))  # as World does when it is entered
    with pytest.raises(DataError, match="was made in another world than this one, or before it"):
        next(iter(loader))
    with pytest.raises(DataError, match="world and process_group: give one of them"):
        DataLoader(range(4), process_group=group, world=World())


def test_a_data_set_that_changes_length() -> None:
    data = list(range(10))
    [loader] = loaders(data, 1, 2, 3)
    turns_of(loader, 1)
    state = loader.state_dict()
    data.append(10)
    with pytest.raises(DataError, match="had 10 samples when the loader was made and has 11 now"):
        turns_of(loader)
    [longer] = loaders(data, 1, 2, 3)
    with pytest.raises(DataError, match="a length of 10, this loader 11"):
        longer.load_state_dict(state)


def test_another_virtual_size_on_resume() -> None:
    def state(size: int, virtual_size: int | None) -> dict[str, Any]:
        loader = loaders(range(40), size, virtual_size, 2)[0]
        turns_of(loader, 1) if loader.yields_steps else next(iter(loader))
        return loader.state_dict()

    [by_four] = loaders(range(40), 1, 4, 2)
    by_four.load_state_dict(state(2, 4))
    by_four.load_state_dict(state(4, None))
    with pytest.raises(DataError, match=r"virtual_size=3 and goes on with virtual_size=4.*size=3\)"):
        by_four.load_state_dict(state(2, 3))
    with pytest.raises(DataError, match="with 2 processes and no virtual_size and goes on with virtual"):
        by_four.load_state_dict(state(2, None))
    plain_loader = loaders(range(40), 3, None, 2)[0]
    with pytest.raises(DataError, match="goes on with 3 processes and no virtual_size"):
        plain_loader.load_state_dict(state(2, 4))
    plain_loader.load_state_dict(state(2, None))  # no promise was made, and none is broken
    assert plain_loader.state_dict()["num_consumed"] == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "has seed 1, this loader 0"),
        ({"order": "sequential"}, "has the order 'sequential', this loader 'shuffled 1'"),
        ({"num_consumed": 41}, r"num_consumed=41 is not in 0..40"),
        ({"num_consumed": -1}, "num_consumed=-1: it must be at least 0"),
        ({"epoch": "first"}, "epoch='first' is not a whole number"),
        ({"strange": 1}, "this is not the state of a"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change: dict[str, Any], message: str) -> None:
    [loader] = loaders(range(40), 1, 2, 3, shuffle=True)
    turns_of(loader, 2)
    before = loader.state_dict()
    with pytest.raises(DataError, match=message):
        loader.load_state_dict(before | change)
    assert loader.state_dict() == before
    with pytest.raises(DataError, match="this is not the state of a"):
        loader.load_state_dict({"epoch": 1})


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ([], {}, "the data set is empty"),
        (range(5), {"batch_size": 3, "drop_last": True}, "has 5 samples and a step takes 6"),
        (range(5), {"mode": "most"}, "mode='most' is not one of 'exact'"),
        (range(5), {"mode": "pad", "drop_last": True}, "drop_last=True contradicts mode='pad'"),
        (range(5), {"batch_size": 0}, "batch_size=0: it must be at least 1"),
        (range(5), {"batch_size": 1.5}, "batch_size=1.5 is not a whole number"),
        (range(5), {"accumulation": 0}, "accumulation=0: it must be at least 1"),
        (range(5), {"mode": "evaluate", "accumulation": 2}, "accumulation is for training"),
        (range(5), {"mode": "evaluate", "shuffle": True}, "in its order: drop shuffle"),
        (range(5), {"sampler": [1], "shuffle": True}, "shuffle and sampler each say"),
        (range(5), {"sampler": [1], "batch_sampler": [[1]]}, "sampler and batch_sampler each say"),
        (range(5), {"batch_size": 3, "batch_sampler": [[1]]}, "batch_size and batch_sampler each say"),
        (
            range(5),
            {"sampler": DistributedSampler(range(5), 1, 0)},
            "a DistributedSampler shares samples out",
        ),
        (range(5), {"sampler": weighted_sampler()}, "15 weights for 5 samples"),
        (range(5), {"in_order": False}, "batches must come in order"),
        (Numbers(5), {"shuffle": True}, "Numbers is iterable and has an order of its own: drop shuffle"),
    ],
)
def test_arguments_that_make_no_sense(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        loaders(dataset, 1, 2, **options)


def test_what_a_loader_does_not_have() -> None:
    class Endless:
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(DataError, match="Endless has no length"):
        loaders(Endless(), 1, 2)
    assert counted(turns_of(loaders(Endless(), 1, 2, 2, sampler=[7, 8, 9])[0])) == [7, 9, 8]
    with pytest.raises(TypeError, match="Numbers has no length"):
        len(loaders(Numbers(5), 1, 2)[0])
    [evaluating] = loaders(Subset(range(9), range(3)), 1, 2, mode="evaluate")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="has no state"):
        evaluating.state_dict()
    with pytest.raises(DataError, match=r"gather\(of=loader\) needs"):
        loaders(range(5), 1, 2)[0].rows_by_rank([5])
    with pytest.raises(TypeError, match="num_wrokers"):
        loaders(range(5), 1, 2, num_wrokers=2)
