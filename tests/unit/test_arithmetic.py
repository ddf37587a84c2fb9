"""What bits depend on: recorded, compared, and set for the length of a block."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from samestep import checkpoint
from samestep.arithmetic import arithmetic_of_this_process, differences, set_up
from samestep.checkpoint.same_bits import same_bits_notes
from samestep.testing import thread_ranks
from samestep.virtual import VirtualRanks, virtual_ranks


def test_nothing_differs_from_itself() -> None:
    now = arithmetic_of_this_process()
    assert differences(now) == []
    assert now["cpu"]


def test_differences_are_named() -> None:
    before = {**arithmetic_of_this_process(), "num_threads": 7, "cpu": "Z80"}
    first, second = differences(before)
    assert first.startswith("the CPU was Z80 and is ")
    assert second == f"the number of threads per process was 7 and is {torch.get_num_threads()}"
    assert differences({"torch": str(torch.__version__)}) == []  # of a version that recorded less


def test_threads_and_algorithms_are_those_of_the_block() -> None:
    before = torch.get_num_threads()
    with set_up(3, deterministic_algorithms=True):
        assert torch.get_num_threads() == 3
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == before
    assert not torch.are_deterministic_algorithms_enabled()


def _saved_and_loaded(folder: Path, before: int | None, now: int | None) -> list[str]:
    def run(group: dist.ProcessGroup) -> list[str]:
        model = torch.nn.Linear(2, 2)
        virtual_ranks(group, attach=VirtualRanks(0, 1, virtual_size=before))
        with set_up(2, deterministic_algorithms=False):
            checkpoint.save(folder, {"model": model}, step=1, process_group=group)
        virtual_ranks(group, attach=VirtualRanks(0, 1, virtual_size=now))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return list(checkpoint.load(folder, {"model": model}, process_group=group).notes)

    torch.set_num_threads(1)
    return thread_ranks(run, 1)[0]


def test_a_run_that_goes_on_elsewhere_is_told_what_changed(tmp_path: Path) -> None:
    (note,) = _saved_and_loaded(tmp_path, 4, 4)
    assert "the number of threads per process was 2 and is 1" in note


def test_a_run_of_other_virtual_ranks_is_another_run(tmp_path: Path) -> None:
    first, _ = _saved_and_loaded(tmp_path, 4, 8)
    assert "is of a run of virtual_size=4, and this world has 8" in first


@pytest.mark.parametrize(("before", "now"), [(None, None), (4, None), (None, 4)])
def test_without_virtual_ranks_nothing_was_promised(
    tmp_path: Path, before: int | None, now: int | None
) -> None:
    assert _saved_and_loaded(tmp_path, before, now) == []


def test_a_foreign_record_says_nothing() -> None:
    assert same_bits_notes(["?"], 4, "there") + same_bits_notes(None, 4, "there") == []
