from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset

from samestep.data import DistributedSampler
from samestep.errors import DataError, SamestepError


def samplers(length: int, num_replicas: int, **options: Any) -> list[DistributedSampler]:
    return [DistributedSampler(range(length), num_replicas, rank, **options) for rank in range(num_replicas)]


def interleaved(shares: list[list[int]]) -> list[int]:
    """The order that the ranks' shares were dealt from."""
    longest = max(map(len, shares))
    return [share[i] for i in range(longest) for share in shares if i < len(share)]


def draw(iterator: Iterator[int], num: int) -> list[int]:
    return [next(iterator) for _ in range(num)]


@given(length=st.integers(1, 60), num_replicas=st.integers(1, 9), shuffle=st.booleans())
def test_exact_hands_out_each_sample_once(length: int, num_replicas: int, shuffle: bool) -> None:
    shares = [list(s) for s in samplers(length, num_replicas, shuffle=shuffle, mode="exact")]
    assert sorted(interleaved(shares)) == list(range(length))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(length=st.integers(1, 60), num_replicas=st.integers(1, 9), seed=st.integers(0, 3))
def test_pad_and_drop_give_equal_shares_and_waste_less_than_a_sample_per_rank(
    length: int, num_replicas: int, seed: int
) -> None:
    if length < num_replicas:
        return
    padded = [list(s) for s in samplers(length, num_replicas, seed=seed)]
    counts = Counter(interleaved(padded))
    assert len({len(share) for share in padded}) == 1
    assert set(counts) == set(range(length))
    assert max(counts.values()) <= 2
    assert counts.total() - length < num_replicas

    dropped = [list(s) for s in samplers(length, num_replicas, seed=seed, mode="drop")]
    assert len({len(share) for share in dropped}) == 1
    assert max(Counter(interleaved(dropped)).values()) == 1
    assert length - len(interleaved(dropped)) < num_replicas


@given(
    length=st.integers(6, 80),
    phases=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), max_size=4),
    last_size=st.integers(1, 6),
    mode=st.sampled_from(["pad", "drop", "exact"]),
    shuffle=st.booleans(),
)
def test_an_epoch_resumed_at_any_number_of_ranks_is_the_same_epoch(
    length: int, phases: list[tuple[int, int]], last_size: int, mode: Any, shuffle: bool
) -> None:
    options = {"mode": mode, "shuffle": shuffle, "seed": 9}
    order = list(samplers(length, 1, **options)[0])
    seen: list[int] = []
    state = samplers(length, 1, **options)[0].state_dict()
    for size, num_steps in [*phases, (last_size, length)]:
        ranks = samplers(length, size, **options)
        shares = []
        for sampler in ranks:
            sampler.load_state_dict(json.loads(json.dumps(state)))
            num = min(num_steps, len(sampler))
            iterator = iter(sampler)
            share = list(islice(iterator, num))
            next(iterator, None)  # a loader draws ahead
            sampler.consumed(num)
            shares.append(share)
        seen += interleaved(shares)
        state = ranks[0].state_dict()
        if state["epoch"] == 1:
            break
    num_whole = min(length, len(seen))
    assert seen[:num_whole] == order[:num_whole]
    if mode == "exact":
        assert len(seen) == length
    else:
        assert abs(len(seen) - length) < max(size for size, _ in [*phases, (last_size, 0)])
        assert (len(seen) - length) * (1 if mode == "pad" else -1) >= 0


def test_epochs_advance_by_themselves() -> None:
    first, second = samplers(20, 1)[0], samplers(20, 1)[0]
    orders = [list(first) for _ in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    for epoch, order in enumerate(orders):
        second.set_epoch(epoch)
        assert list(second) == order
        assert second.epoch == epoch


def test_set_epoch_fixes_the_next_epoch_and_the_count_goes_on_from_there() -> None:
    [counting], [set_to_5] = samplers(20, 1), samplers(20, 1)
    orders = [list(counting) for _ in range(7)]
    set_to_5.set_epoch(5)
    assert set_to_5.epoch == 5
    assert [list(set_to_5), list(set_to_5)] == orders[5:]
    set_to_5.set_epoch(5)
    assert list(set_to_5) == orders[5]


def test_an_epoch_starts_with_its_first_index_and_need_not_end() -> None:
    [sampler], [other] = samplers(20, 1), samplers(20, 1)
    orders = [list(other) for _ in range(3)]
    unused, used = iter(sampler), iter(sampler)
    assert sampler.epoch == 0
    assert draw(used, 3) == orders[0][:3]
    assert list(sampler) == orders[1]
    assert list(unused) == orders[2]
    assert draw(used, 2) == orders[0][3:5]  # an iterator left alone keeps its epoch


def test_without_shuffle_every_epoch_is_in_order() -> None:
    [sampler] = samplers(5, 1, shuffle=False)
    assert [list(sampler), list(sampler)] == [[0, 1, 2, 3, 4]] * 2


def test_state_counts_what_was_consumed_and_not_what_a_loader_drew_ahead() -> None:
    sampler = samplers(40, 2)[0]
    iterator = iter(sampler)
    assert sampler.state_dict()["num_consumed"] == 0
    draw(iterator, 12)
    assert sampler.state_dict()["num_consumed"] == 24  # never told: all that was handed out
    sampler.consumed(4)
    sampler.consumed(4)
    assert sampler.state_dict() == {
        "version": 1,
        "permutation_version": 1,
        "dataset_length": 40,
        "shuffle": True,
        "seed": 0,
        "mode": "pad",
        "epoch": 0,
        "num_consumed": 16,
    }
    draw(iterator, 8)
    sampler.consumed(12)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["num_consumed"]) == (1, 0)
    draw(iter(sampler), 3)  # told once, the sampler goes by what it is told in later epochs too
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["num_consumed"]) == (1, 0)


def test_the_length_is_that_of_the_next_iteration() -> None:
    sampler = samplers(40, 2)[0]
    draw(iter(sampler), 5)
    resumed = samplers(40, 4)[1]
    resumed.load_state_dict(sampler.state_dict())
    assert (len(resumed), resumed.num_samples, resumed.total_size) == (8, 10, 40)
    assert len(list(resumed)) == 8
    assert len(resumed) == 10


def test_set_epoch_keeps_the_position_of_the_epoch_that_was_loaded_and_no_other() -> None:
    sampler = samplers(40, 2)[0]
    sampler.set_epoch(3)
    draw(iter(sampler), 5)
    for epoch, length in ((3, 15), (4, 20), (2, 20)):
        resumed = samplers(40, 2)[0]
        resumed.load_state_dict(sampler.state_dict())
        assert resumed.epoch == 3
        resumed.set_epoch(epoch)
        assert len(resumed) == length
    sampler.set_epoch(3)
    assert len(list(sampler)) == 20


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def collate(items: list[int]) -> list[int]:
    return items


def test_a_loader_that_keeps_the_samplers_state_beside_each_batch_resumes_after_it() -> None:
    """As torchdata's StatefulDataLoader does: a snapshot whenever it has drawn a batch, ahead of the loop."""
    whole = list(samplers(30, 2)[0])
    sampler = samplers(30, 2)[0]
    batches = BatchSampler(sampler, 4, drop_last=False)
    snapshots = [(batch, sampler.state_dict()) for batch in batches]
    assert [index for batch, _ in snapshots for index in batch] == whole
    for number, (_, state) in enumerate(snapshots[:-1]):
        resumed = samplers(30, 2)[0]
        resumed.load_state_dict(state)
        assert list(resumed) == whole[4 * (number + 1) :]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_resumes_where_training_was(num_workers: int) -> None:
    dataset = Numbers(50)
    options: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers, "collate_fn": collate}
    if num_workers:
        options |= {"multiprocessing_context": "forkserver", "persistent_workers": True}
    sampler = DistributedSampler(dataset, 1, 0)
    loader = DataLoader(dataset, sampler=sampler, **options)
    whole = [index for batch in loader for index in batch]
    sampler.set_epoch(0)
    seen = []
    for step, batch in enumerate(loader):
        seen += batch
        sampler.consumed(len(batch))
        if step == 4:
            break
    resumed = [DistributedSampler(dataset, 3, rank) for rank in range(3)]
    for other in resumed:
        other.load_state_dict(sampler.state_dict())
    loaders = [DataLoader(dataset, 4, sampler=other, collate_fn=collate) for other in resumed]
    shares = [[index for batch in each for index in batch] for each in loaders]
    assert (seen + interleaved(shares))[:50] == whole
    following = DistributedSampler(dataset, 1, 0)
    following.set_epoch(1)
    assert [index for batch in loader for index in batch] == list(following)


def test_a_billion_samples_start_in_under_a_megabyte() -> None:
    next(iter(DistributedSampler(range(10**9), 1, 0)))
    tracemalloc.start()
    try:
        assert 0 <= next(iter(DistributedSampler(range(10**9), 8, 3))) < 10**9
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_world_of_one_needs_no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    sampler = DistributedSampler(range(7))
    assert (sampler.num_replicas, sampler.rank, len(sampler)) == (1, 0, 7)


def test_the_launchers_variables_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "WORLD_SIZE": "3", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    sampler = DistributedSampler(range(7))
    assert (sampler.num_replicas, sampler.rank) == (3, 2)
    assert DistributedSampler(range(7), 5).num_replicas == 5


class Endless(Dataset[int]):
    pass


@pytest.mark.parametrize(
    ("dataset", "arguments", "message"),
    [
        ([], {}, "the data set is empty"),
        (range(3), {"num_replicas": 4, "rank": 0}, "3 samples for 4 ranks: start at most 3 ranks"),
        (range(3), {"num_replicas": 4, "rank": 0, "drop_last": True}, "3 samples for 4 ranks"),
        (range(9), {"num_replicas": 4, "rank": 4}, r"rank=4 is not in 0\.\.3 \(num_replicas=4\)"),
        (range(9), {"num_replicas": 4, "rank": -1}, "rank=-1 is not in"),
        (range(9), {"num_replicas": 0, "rank": 0}, "num_replicas=0: at least 1 rank"),
        (range(9), {"num_replicas": 1, "rank": 0, "mode": "even"}, "mode='even' is not one of 'pad', 'drop'"),
        (range(9), {"num_replicas": 1, "rank": 0, "mode": "pad", "drop_last": True}, "drop_last=True contra"),
        (range(9), {"num_replicas": 1, "rank": 0, "seed": 0.5}, "seed=0.5 is not a whole number"),
        (Endless(), {"num_replicas": 1, "rank": 0}, "Endless has no length"),
        (iter([1]), {"num_replicas": 1, "rank": 0}, "list_iterator has no length"),
    ],
)
def test_mistakes_get_one_clear_line(dataset: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        DistributedSampler(dataset, **{"num_replicas": 1, "rank": 0} | arguments)
    assert isinstance(caught.value, SamestepError)
    assert "\n" not in str(caught.value)


def test_counting_more_than_was_handed_out_is_an_error() -> None:
    sampler = samplers(40, 2)[0]
    with pytest.raises(DataError, match="no iteration of this sampler has started"):
        sampler.consumed(4)
    draw(iter(sampler), 6)
    sampler.consumed(4)
    with pytest.raises(DataError, match="makes 8 of the 6 samples that rank 0 was handed in epoch 0"):
        sampler.consumed(4)
    assert sampler.state_dict()["num_consumed"] == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset_length": 41}, "dataset_length=41, this sampler dataset_length=40"),
        ({"seed": 1}, "seed=1, this sampler seed=0"),
        ({"mode": "exact"}, "mode='exact', this sampler mode='pad'"),
        ({"shuffle": False}, "shuffle=False, this sampler shuffle=True"),
        ({"version": 2}, "version=2"),
        ({"num_consumed": 41}, r"num_consumed=41 is not in 0\.\.40"),
        ({"num_consumed": -1}, r"num_consumed=-1 is not in 0\.\.40"),
        ({"epoch": "3"}, "epoch='3' is not a whole number"),
        ({"more": 1}, "not the state of a DistributedSampler"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change: dict[str, Any], message: str) -> None:
    sampler = samplers(40, 2)[0]
    draw(iter(sampler), 3)
    before = sampler.state_dict()
    with pytest.raises(DataError, match=message):
        sampler.load_state_dict(before | change)
    assert sampler.state_dict() == before
    with pytest.raises(DataError, match="not the state of a DistributedSampler"):
        sampler.load_state_dict([])  # type: ignore[arg-type]


def test_a_data_set_that_changes_length_is_an_error() -> None:
    data = [1, 2, 3]
    sampler = DistributedSampler(data, 1, 0)
    data.append(4)
    with pytest.raises(DataError, match="had 3 samples when the sampler was made and has 4 now"):
        list(sampler)
