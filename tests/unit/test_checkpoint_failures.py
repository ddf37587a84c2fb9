"""File operations that fail, each in turn; leftovers of dead writers; writers that race."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from samestep import checkpoint
from samestep.checkpoint.owner import SAVING, Owner, _state_and_start, hidden_name, is_abandoned
from samestep.errors import CheckpointError

STATE = {"weight": torch.arange(8.0), "n": 1}


class Failing(checkpoint.Files):
    """The operation number `index` fails."""

    def __init__(self, index: int = -1, code: int = errno.ENOSPC) -> None:
        self.count = 0
        self._index, self._code = index, code

    def _step(self) -> None:
        self.count += 1
        if self.count - 1 == self._index:
            raise OSError(self._code, os.strerror(self._code))

    def make_directory(self, path: Path) -> None:
        self._step()
        super().make_directory(path)

    def create(self, path: Path) -> BinaryIO:
        self._step()
        return super().create(path)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        file.write(data[: len(data) // 2])
        self._step()
        super().write(file, data[len(data) // 2 :])

    def sync(self, file: BinaryIO) -> None:
        self._step()
        super().sync(file)

    def sync_directory(self, path: Path) -> None:
        self._step()
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)

    def remove_tree(self, path: Path) -> None:
        if path.name.startswith(".removing"):
            self._step()
        super().remove_tree(path)


def count_operations(directory: Path, **options: Any) -> int:
    counting = Failing()
    checkpoint.save(directory, STATE, files=counting, **options)
    return counting.count


@pytest.mark.parametrize("step", [1, 2])
def test_whatever_fails_the_checkpoint_before_stays(tmp_path: Path, step: int) -> None:
    first = checkpoint.save(tmp_path / "counted", {"n": 0}, step=1)
    num_operations = count_operations(tmp_path / "counted", step=step, keep=1)
    for index in range(num_operations):
        root = tmp_path / str(index)
        first = checkpoint.save(root, {"n": 0}, step=1)
        warned = index >= num_operations - 2  # only the removal of the old one failed
        revealed = index >= num_operations - 3  # the last sync of the directory failed
        if warned:
            with pytest.warns(RuntimeWarning, match="is saved, but an older one could not be removed"):
                checkpoint.save(root, STATE, step=step, keep=1, files=Failing(index))
        else:
            with pytest.raises(CheckpointError, match=rf"cannot write .* step {step} in .*space"):
                checkpoint.save(root, STATE, step=step, keep=1, files=Failing(index))
        assert checkpoint.load(root, {"n": 5}).values == {"n": 1 if revealed else 0}
        left = {path.name for path in root.iterdir()} - {first.name}
        assert len(left) == (1 if revealed else 0) + (1 if index == num_operations - 1 else 0)
        # The next save succeeds.
        checkpoint.save(root, {"n": 7}, step=3)
        assert checkpoint.load(root, {"n": 5}).values == {"n": 7}


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "No space left on device.*Free some space, or keep fewer checkpoints"),
        (errno.EDQUOT, "Free some space"),
        (errno.EACCES, "Permission denied.*Choose a directory that this user can write to"),
        (errno.EROFS, "Read-only file system.*Choose a directory"),
        (errno.EIO, "Input/output error.*Check the disk, or choose another directory"),
    ],
)
def test_the_message_says_why_and_what_to_do(tmp_path: Path, code: int, advice: str) -> None:
    with pytest.raises(CheckpointError, match=advice) as caught:
        checkpoint.save(tmp_path, STATE, step=1, files=Failing(2, code))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_deleted_under_us(tmp_path: Path) -> None:
    class Deleting(checkpoint.Files):
        def sync(self, file: BinaryIO) -> None:
            for path in (tmp_path / "run").iterdir():
                self.remove_tree(path)
            (tmp_path / "run").rmdir()
            super().sync(file)

    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint of step 1 .*No such file"):
        checkpoint.save(tmp_path / "run", STATE, step=1, files=Deleting())


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    class Interrupted(checkpoint.Files):
        def sync(self, file: BinaryIO) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, STATE, step=1, files=Interrupted())
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_writer_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path: Path) -> None:
    own = tmp_path / hidden_name(SAVING, "step-000000001")
    alive = Owner.current()
    dead_start = tmp_path / own.name.replace(f"-{alive.started}-", f"-{alive.started + 1}-")
    dead_pid = tmp_path / own.name.replace(f"-{alive.pid}-", f"-{2**22 + 1}-")
    elsewhere_new = tmp_path / own.name.replace(alive.place, "0" * 12)
    elsewhere_old = tmp_path / own.name.replace(alive.place, "1" * 12)
    foreign = [tmp_path / ".saving-mine", tmp_path / ".other"]
    for path in (own, dead_start, dead_pid, elsewhere_new, elsewhere_old, *foreign):
        path.mkdir()
        (path / "file").write_text("x")
    for path in (elsewhere_old / "file", elsewhere_old):
        os.utime(path, (0, 0))
    link = tmp_path / dead_pid.name.replace("000000001", "000000002")
    link.symlink_to(tmp_path / ".other", target_is_directory=True)

    assert [is_abandoned(path) for path in (own, dead_start, dead_pid)] == [False, alive.started != 0, True]
    written = checkpoint.save(tmp_path, STATE, step=5)
    left = {path.name for path in tmp_path.iterdir()}
    expected = {path.name for path in (own, elsewhere_new, written, link, *foreign)}
    assert left - {dead_start.name} == expected
    assert (tmp_path / ".other" / "file").exists()


def test_a_writer_that_ended_without_being_waited_for_is_dead() -> None:
    reading, writing = os.pipe()
    alive = Owner.current()
    pid = os.posix_spawn(
        "/bin/sh",
        ["sh", "-c", "read line"],
        {},
        file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0), (os.POSIX_SPAWN_CLOSE, writing)],
    )
    os.close(reading)
    owner = Owner(alive.place, pid, _state_and_start(pid)[1])
    assert not owner.is_dead()
    os.close(writing)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # ended, and a zombie until waited for
    assert owner.is_dead() == (owner.started != 0)
    os.waitpid(pid, 0)
    assert owner.is_dead()


@pytest.mark.parametrize("same_step", [False, True])
def test_writers_that_race_leave_whole_checkpoints(tmp_path: Path, same_step: bool) -> None:
    num_writers, num_saves = 4, 6
    start = threading.Barrier(num_writers)

    def write(writer: int) -> list[Path]:
        start.wait()
        steps = [7 if same_step else 10 * number + writer for number in range(num_saves)]
        state = {"writer": writer, "weight": torch.full((64,), float(writer))}
        return [checkpoint.save(tmp_path, state, step=s, random_states=False, keep=2) for s in steps]

    with ThreadPoolExecutor(num_writers) as pool:
        paths = [path for saved in pool.map(write, range(num_writers)) for path in saved]
    assert len(set(paths)) == num_writers * num_saves
    latest = checkpoint.latest(tmp_path)
    assert latest in paths
    for path in tmp_path.iterdir():
        assert not path.name.startswith(".")
        values = checkpoint.load(path, {"writer": 0, "weight": None}, random_states=False).values
        assert torch.equal(values["weight"], torch.full((64,), float(values["writer"])))


def test_the_newest_is_found_while_others_are_written_and_removed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"n": 0}, step=0, random_states=False)
    stop = threading.Event()

    def look() -> int:
        looks = 0
        while not stop.is_set():
            assert checkpoint.latest(tmp_path) is not None
            looks += 1
        return looks

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            for number in range(1, 60):
                checkpoint.save(tmp_path, {"n": number}, step=number // 2, keep=1, random_states=False)
        finally:
            stop.set()
        assert looking.result() > 0
