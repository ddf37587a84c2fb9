"""Preemption: real signals to real ranks; all stop at the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import samestep
from launcher import launch, script, wait_until_gone
from samestep.errors import WorldError
from samestep.testing import process_ranks

TRAINING = """
import signal
import torch, samestep

with samestep.World() as world, samestep.Preemption({arguments}) as preemption:
    model = samestep.DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range({num_steps}):
        model(torch.ones(2, 4)).sum().backward()
        time.sleep(0.02)
        if step == 2:
            print("ready", os.getpid())
        if preemption.requested():
            saved = samestep.checkpoint.save("runs", {{"model": model}}, step=step)
            print("saved", saved.name)
            {after}
            raise samestep.Preempted
print("finished")
"""


def training(tmp_path: Path, *, num_steps: int = 100_000, after: str = "pass", arguments: str = "") -> None:
    script(tmp_path, TRAINING.format(num_steps=num_steps, after=after, arguments=arguments))


def saved(stdout: str) -> list[str]:
    return [line.split()[-1] for line in stdout.splitlines() if " saved " in line]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_all_ranks_stop_at_the_same_step_whoever_got_the_signal(size: int, backend: str) -> None:
    stops = process_ranks(_until_requested, size, backend)
    assert len(set(stops)) == 1, stops
    assert stops[0] in (5, 6)  # the signal comes in the middle of step 5


def _until_requested(backend: str) -> int:
    group = dist.new_group(backend=backend) if backend == "gloo" else _shm_group()
    with samestep.Preemption(group) as preemption:
        for step in range(100):
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            if step == 5 and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)  # one more is no more
            if preemption.requested():
                assert preemption.requested()  # and it stays so
                return step
    raise AssertionError("nobody was asked to end")


def _shm_group() -> dist.ProcessGroup:
    samestep.shm.register()
    group = dist.new_group(backend="shm")
    assert isinstance(group, dist.ProcessGroup)
    return group


def _leaves_things_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with samestep.Preemption() as preemption:
        for _ in range(3):
            assert not preemption.requested()
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(WorldError, match="enter Preemption first"):
        samestep.Preemption().requested()
    caught: list[BaseException] = []

    def enter() -> None:
        try:
            samestep.Preemption().__enter__()
        except WorldError as error:
            caught.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
    dist.barrier()  # nothing of it is in flight


def test_without_a_signal_nothing_happens() -> None:
    process_ranks(_leaves_things_as_they_were, 2)


def test_the_launchers_sigterm_becomes_status_75(tmp_path: Path) -> None:
    training(tmp_path)
    with launch(tmp_path, "run", "--nproc", "2", "--max-restarts", "3", "script.py") as launched:
        pids = [int(words[-1]) for words in launched.wait_for_lines(2)]
        launched.send(signal.SIGTERM)
        assert launched.wait() == 75, launched.stderr
        assert len(set(saved(launched.stdout))) == 1
        assert len(saved(launched.stdout)) == 2
        assert "all 2 rank(s) stop at this step" in launched.stderr
        assert "ended as asked, with status 75: start the run again" in launched.stderr
        assert wait_until_gone(pids) == []
    step = samestep.checkpoint.latest(tmp_path / "runs")
    assert step is not None
    assert step.name == saved(launched.stdout)[0]


def test_a_signal_to_one_rank_alone_is_no_failure_and_no_restart(tmp_path: Path) -> None:
    training(tmp_path, after="time.sleep(1.5 * world.rank)")  # longer than a failed rank may take to leave
    with launch(tmp_path, "run", "--nproc", "2", "--max-restarts", "3", "script.py") as launched:
        words = launched.wait_for_lines(2)
        os.kill(int(words[0][-1]), signal.SIGTERM)
        assert launched.wait() == 75, launched.stderr
        assert len(saved(launched.stdout)) == 2
        assert "failed" not in launched.stderr
        assert "restart" not in launched.stderr


def test_a_rank_that_fails_meanwhile_is_what_the_report_says(tmp_path: Path) -> None:
    training(tmp_path, after="\n            if world.rank == 1: raise ValueError('disk on fire')")
    with launch(tmp_path, "run", "--nproc", "2", "script.py") as launched:
        words = launched.wait_for_lines(2)
        os.kill(int(words[0][-1]), signal.SIGTERM)
        assert launched.wait() == 1, launched.stderr
        report = [line for line in launched.stderr.splitlines() if line.startswith("rank ")]
        assert report[0].startswith("rank 1 of 2 failed: exit code 1")
        assert "ValueError: disk on fire" in launched.stderr


def test_other_signals_by_choice(tmp_path: Path) -> None:
    training(tmp_path, arguments="signals=[signal.SIGUSR1]")
    with launch(tmp_path, "run", "--nproc", "2", "script.py") as launched:
        launched.wait_for_lines(2)
        launched.send(signal.SIGUSR1)  # which the launcher passes on
        assert launched.wait() == 75, launched.stderr
        assert len(saved(launched.stdout)) == 2


def test_ranks_that_take_too_long_are_killed(tmp_path: Path) -> None:
    training(tmp_path, after="time.sleep(600)")
    with launch(tmp_path, "run", "--nproc", "2", "--grace", "1", "script.py") as launched:
        launched.wait_for_lines(2)
        sent_s = time.monotonic()
        launched.send(signal.SIGTERM)
        assert launched.wait() == 128 + signal.SIGTERM
        assert time.monotonic() - sent_s < 20  # not the 600 s that they would take
        assert len(saved(launched.stdout)) == 2
