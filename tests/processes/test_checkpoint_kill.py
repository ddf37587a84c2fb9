"""Writers that are killed for real at every file operation, and a disk that is full for real."""

from __future__ import annotations

import os
import random
import resource
import signal
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

from samestep import checkpoint
from samestep.errors import CheckpointError
from samestep.testing import process_ranks, rank_context

STATE = {"weight": torch.arange(1000.0), "n": 1}


class Dying(checkpoint.Files):
    """`kill -9` of this process at operation number `index`: before it, or in the middle of it."""

    def __init__(self, index: int) -> None:
        self._left = index

    def _step(self) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    def make_directory(self, path: Path) -> None:
        self._step()
        super().make_directory(path)

    def create(self, path: Path) -> BinaryIO:
        self._step()
        return super().create(path)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        self._step()
        file.write(data[: len(data) // 2])
        self._step()
        super().write(file, data[len(data) // 2 :])

    def sync(self, file: BinaryIO) -> None:
        self._step()
        super().sync(file)
        self._step()

    def sync_directory(self, path: Path) -> None:
        self._step()
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)
        self._step()

    def remove_tree(self, path: Path) -> None:
        self._step()
        for file in sorted(path.iterdir()):
            file.unlink()
            self._step()
        path.rmdir()


def _die_at_every_operation(root: str, step: int) -> None:
    """In a process with one thread, where forking is safe: one child per operation, until one survives."""
    torch.set_num_threads(1)
    index, status = 0, int(signal.SIGKILL)
    while status == signal.SIGKILL:
        directory = Path(root, str(index))
        checkpoint.save(directory, {"n": 0}, step=1)
        child = os.fork()
        if child == 0:
            try:
                checkpoint.save(directory, STATE, step=step, keep=1, files=Dying(index))
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        index += 1
    os._exit(status)


@pytest.mark.parametrize("step", [1, 2], ids=["same-step", "next-step"])
def test_a_writer_killed_at_any_operation_leaves_a_whole_checkpoint(tmp_path: Path, step: int) -> None:
    process = rank_context().Process(target=_die_at_every_operation, args=(str(tmp_path), step))
    process.start()
    process.join(50)
    assert process.exitcode == 0
    seen = []
    for index in range(len(list(tmp_path.iterdir()))):
        root = tmp_path / str(index)
        seen.append(checkpoint.load(root, {"n": 5}).values["n"])
        # What the dead one left behind does not hinder the next one, and is gone after it.
        checkpoint.save(root, {"n": 2}, step=3, keep=1)
        assert [path.name for path in root.iterdir()] == ["step-000000003"]
    assert len(seen) > 30
    assert seen == sorted(seen)  # the old one up to the rename, the new one from there on
    assert (seen[0], seen[-1]) == (0, 1)


def _save_beyond_the_limit(root: str) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
    try:
        checkpoint.save(root, {"n": 1, "weight": torch.zeros(20_000)}, step=2)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "saved"


def test_a_file_that_the_disk_does_not_take(tmp_path: Path) -> None:
    """The kernel itself refuses the bytes, in the middle of a file; no rank waits."""
    first = checkpoint.save(tmp_path, {"n": 0}, step=1)
    messages = process_ranks(_save_beyond_the_limit, 2, str(tmp_path))
    assert len(set(messages)) == 1
    assert messages[0].startswith("rank 0: cannot write the checkpoint of step 2")
    assert "File too large" in messages[0]
    assert list(tmp_path.iterdir()) == [first]
    assert checkpoint.load(tmp_path, {"n": 5}).values == {"n": 0}


def _draw() -> Any:
    return random.random(), float(np.random.random()), torch.rand(2).tolist()


def _seed_save_draw(root: str) -> Any:
    rank = int(os.environ["RANK"])
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    checkpoint.save(root, {}, step=1)
    return _draw()


def _load_draw(root: str) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = checkpoint.load(root, {})
    return _draw(), loaded.notes, [str(warning.message) for warning in caught]


def test_each_ranks_random_streams_go_on(tmp_path: Path) -> None:
    drawn = process_ranks(_seed_save_draw, 2, str(tmp_path))
    assert drawn[0] != drawn[1]
    again = process_ranks(_load_draw, 2, str(tmp_path))
    assert [(values, notes) for values, notes, _ in again] == [(drawn[0], ()), (drawn[1], ())]


def test_a_world_of_another_size_gets_new_streams_and_a_note(tmp_path: Path) -> None:
    drawn = process_ranks(_seed_save_draw, 2, str(tmp_path))
    first = process_ranks(_load_draw, 3, str(tmp_path))
    second = process_ranks(_load_draw, 3, str(tmp_path))
    assert [values for values, _, _ in first] == [values for values, _, _ in second]
    assert len({str(values) for values, _, _ in first} | set(map(str, drawn))) == 5
    assert all("saved by 2 ranks and is loaded by 3" in notes[0] for _, notes, _ in first)
    assert [len(warned) for _, _, warned in first] == [1, 0, 0]
