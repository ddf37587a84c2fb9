from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader

from samestep import collectives
from samestep.data import DistributedSampler, WeightedSampler
from samestep.errors import DataError
from samestep.gathering import gather
from samestep.testing import thread_ranks

Pair = namedtuple("Pair", ["left", "right"])


def gathered(value_of: Any, world_size: int, **options: Any) -> list[Any]:
    return thread_ranks(lambda group: gather(value_of(group.rank()), group, **options), world_size)


def refusals(value_of: Any, world_size: int = 2, **options: Any) -> list[str]:
    """What each rank's error says; the group is whole afterwards."""

    def attempt(group: dist.ProcessGroup) -> str:
        with pytest.raises(DataError) as caught:
            gather(value_of(group.rank()), group, **options)
        collectives.barrier(group)
        return str(caught.value)

    return thread_ranks(attempt, world_size)


def test_rows_come_rank_after_rank_and_the_structure_is_kept() -> None:
    def value_of(rank: int) -> Any:
        num = [2, 0, 3][rank]
        rows = torch.arange(num) + 10 * rank
        return {
            "rows": rows.float().reshape(num, 1).expand(num, 2),
            7: (rows.to(torch.bfloat16), [rows[:1], rows[1:]]),
            "pair": Pair(rank, [rank > 0] * num),
            "array": rows.numpy().astype(np.int16),
            "complex": rows * 1j,
        }

    for value in gathered(value_of, 3):
        rows = torch.tensor([0, 1, 20, 21, 22])
        assert list(value) == ["rows", 7, "pair", "array", "complex"]
        assert torch.equal(value["rows"], rows.float().reshape(5, 1).expand(5, 2))
        assert torch.equal(value[7][0], rows.to(torch.bfloat16))
        assert torch.equal(value[7][1], rows)
        assert isinstance(value["pair"], Pair)
        assert value["pair"].left.tolist() == [0, 1, 2]
        assert value["pair"].right.tolist() == [False, False, True, True, True]
        assert isinstance(value["array"], np.ndarray)
        assert value["array"].dtype == np.int16
        assert value["array"].tolist() == rows.tolist()
        assert value["complex"].tolist() == [0, 1j, 20j, 21j, 22j]


def test_a_rank_without_any_batch_learns_what_the_others_have() -> None:
    def value_of(rank: int) -> Any:
        return [{"x": torch.full((2, 3), rank), "y": 0.5}] if rank else []

    for value in gathered(value_of, 3):
        assert value["x"].tolist() == [[1] * 3] * 2 + [[2] * 3] * 2
        assert value["y"].tolist() == [0.5, 0.5]
        assert value["y"].dtype == torch.float64
    assert gathered(lambda rank: {"x": [], "y": ()}, 2) == [{"x": [], "y": ()}] * 2
    assert gathered(lambda rank: torch.zeros(0, 4), 2)[1].shape == (0, 4)


def test_only_the_destination_gets_the_result() -> None:
    first, second, third = gathered(lambda rank: torch.tensor([rank]), 3, dst=1)
    assert first is None
    assert third is None
    assert second.tolist() == [0, 1, 2]


@settings(max_examples=15, deadline=None)
@given(
    length=st.integers(0, 23),
    world_size=st.integers(1, 4),
    batch_size=st.integers(1, 5),
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
)
def test_an_exact_samplers_results_come_back_in_the_order_of_the_data_set(
    length: int, world_size: int, batch_size: int, shuffle: bool, seed: int
) -> None:
    length = max(length, 1)
    data = torch.randn(length, generator=torch.Generator().manual_seed(seed))

    def evaluate(group: dist.ProcessGroup) -> Any:
        sampler = DistributedSampler(
            range(length), shuffle=shuffle, mode="exact", seed=seed, process_group=group
        )
        list(sampler)  # the epoch before
        batches = [(i, data[i]) for i in DataLoader(range(length), batch_size, sampler=sampler)]
        return gather(batches, group, of=sampler)

    for value in thread_ranks(evaluate, world_size):
        indices, values = value
        assert indices.tolist() == list(range(length))
        assert torch.equal(values, data)


def test_what_padding_repeated_is_there_once() -> None:
    def evaluate(group: dist.ProcessGroup) -> Any:
        sampler = DistributedSampler(range(7), process_group=group)
        return gather(torch.tensor(list(sampler)), group, of=sampler)

    assert [value.tolist() for value in thread_ranks(evaluate, 3)] == [list(range(7))] * 3


def test_draws_come_back_in_the_order_in_which_they_were_drawn() -> None:
    whole = list(WeightedSampler([1, 2, 3], 20, num_replicas=1, rank=0, seed=3))

    def evaluate(group: dist.ProcessGroup) -> Any:
        sampler = WeightedSampler([1, 2, 3], 20, seed=3, mode="exact", process_group=group)
        return gather([torch.tensor(i) for i in sampler], group, of=sampler)

    assert [value.tolist() for value in thread_ranks(evaluate, 3)] == [whole] * 3


def test_a_metric_of_scikit_learn_is_that_of_one_process() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.rand(101, generator=generator), torch.arange(101) % 3 == 0

    def evaluate(group: dist.ProcessGroup) -> float:
        sampler = DistributedSampler(range(101), shuffle=False, mode="exact", process_group=group)
        mine = list(sampler)
        all_scores, all_labels = gather((scores[mine], labels[mine].numpy()), group, of=sampler)
        return float(roc_auc_score(all_labels, all_scores))

    assert thread_ranks(evaluate, 3) == [float(roc_auc_score(labels, scores))] * 3


def test_rows_of_different_shapes_are_filled_up() -> None:
    def value_of(rank: int) -> Any:
        return [torch.full((1, 2 + rank), rank), torch.full((2, 1), rank)]

    (value, _) = gathered(value_of, 2, pad=-1)
    assert value.tolist() == [[0, 0, -1], [0, -1, -1], [0, -1, -1], [1, 1, 1], [1, -1, -1], [1, -1, -1]]
    for text in refusals(value_of):
        assert "make them equal, or fill them up (pad=...)" in text


@pytest.mark.parametrize(
    ("value_of", "message"),
    [
        (lambda rank: {"a": [1.0, 2]}, r"the value['a'] has rows of float64 and of int64"),
        (lambda rank: {"a": "text"}, "the value['a'] is a str: only tensors"),
        (lambda rank: object() if rank else 1, "the value is a object: only tensors"),
        (lambda rank: {0.5: 1}, "the value has the key 0.5"),
        (lambda rank: 2**70, "which no tensor can hold"),
        (lambda rank: np.array(["a"]), "which no tensor can hold"),
        (lambda rank: [(1, 2), (1, 2, 3)], "the items of the list the value are not alike"),
        (lambda rank: torch.eye(2).to_sparse(), "sparse or quantized"),
        (lambda rank: {"ab"[rank]: 1}, "a dict with 'a' on rank 0 and a dict with 'b' on rank 1"),
        (lambda rank: torch.zeros(1, dtype=[torch.int8, torch.int16][rank]), "rows of int8 and of int16"),
        (lambda rank: torch.zeros(1, rank), "rows of shape [0] and of [1]"),
        (lambda rank: torch.zeros([1] * (rank + 1)), "rows of shape [] and of [1]: make them equal"),
    ],
)
def test_what_cannot_be_gathered_is_an_error_on_all_ranks(value_of: Any, message: str) -> None:
    for text in refusals(value_of):
        assert message in text


def test_rows_that_no_sampler_handed_out_are_an_error() -> None:
    sampler = DistributedSampler(range(5), 2, 0, mode="exact")
    for text in refusals(lambda rank: torch.zeros(3), of=sampler):
        assert "rank 1 gathers 3 rows and was handed 2 samples in epoch 0" in text
    for text in refusals(lambda rank: (torch.zeros(3 - rank), torch.zeros(1)), of=sampler):
        assert "the value[1] has [1, 1] rows on the ranks and the value[0] [3, 2]" in text
    for text in refusals(lambda rank: 1, 3, of=sampler):
        assert "3 ranks gather what a sampler dealt to 2" in text
    for text in refusals(lambda rank: 1, dst=2):
        assert "dst=2 is not in 0..1" in text
