from __future__ import annotations

import errno
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist
from torch import nn

from samestep import checkpoint
from samestep.data import DistributedSampler
from samestep.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from samestep.gradients import DistributedDataParallel
from samestep.testing import thread_ranks


def outcome(action: Any) -> tuple[type, str]:
    """The type and message of the error that `action` raises."""
    try:
        action()
    except Exception as error:
        return type(error), str(error)
    return type(None), ""


class Counting(checkpoint.Files):
    def __init__(self) -> None:
        self.num_files = 0

    def create(self, path: Path) -> BinaryIO:
        self.num_files += 1
        return super().create(path)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rank_0_alone_writes_and_all_return_the_path(tmp_path: Path, world_size: int) -> None:
    def run(group: dist.ProcessGroup) -> tuple[Path, int, Path | None]:
        files = Counting()
        state = {"rank": group.rank(), "weight": torch.ones(2)}
        path = checkpoint.save(tmp_path, state, step=3, process_group=group, files=files)
        return path, files.num_files, checkpoint.latest(tmp_path, process_group=group)

    path = tmp_path / "step-000000003"
    expected = [(path, 0 if rank else 4, path) for rank in range(world_size)]
    assert thread_ranks(run, world_size) == expected
    with pytest.warns(RuntimeWarning) if world_size > 1 else nullcontext():
        assert checkpoint.load(tmp_path, {"rank": 9}).values == {"rank": 0}


@pytest.mark.parametrize("saved_by", [1, 2, 3])
@pytest.mark.parametrize("loaded_by", [1, 2])
def test_a_wrapped_model_loads_at_any_number_of_ranks(tmp_path: Path, saved_by: int, loaded_by: int) -> None:
    def train(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        model = DistributedDataParallel(nn.Linear(3, 2), process_group=group)
        optimizer = torch.optim.AdamW(model.parameters())
        sampler = DistributedSampler(range(24), process_group=group)
        iterator = iter(sampler)
        for _ in range(2):
            index = next(iterator)
            model(torch.full((1, 3), float(index))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            sampler.consumed(1)
        state = {"model": model, "optimizer": optimizer, "sampler": sampler}
        checkpoint.save(tmp_path, state, step=2, process_group=group, random_states=False)
        return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}

    def resume(group: dist.ProcessGroup) -> tuple[dict[str, torch.Tensor], int, list[int]]:
        model = DistributedDataParallel(nn.Linear(3, 2), process_group=group)
        optimizer = torch.optim.AdamW(model.parameters())
        sampler = DistributedSampler(range(24), process_group=group)
        state = {"model": model, "optimizer": optimizer, "sampler": sampler}
        loaded = checkpoint.load(tmp_path, state, process_group=group, random_states=False)
        assert loaded.world_size == saved_by
        step = next(iter(optimizer.state_dict()["state"].values()))["step"]
        return model.module.state_dict(), int(step), list(sampler)

    saved = thread_ranks(train, saved_by)[0]
    bare = nn.Linear(3, 2)
    checkpoint.load(tmp_path, {"model": bare}, random_states=False)
    shares = []
    for weights, step, share in thread_ranks(resume, loaded_by):
        assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())
        assert torch.equal(bare.weight, saved["weight"])
        assert step == 2
        shares.append(share)
    order = list(DistributedSampler(range(24), 1, 0))
    dealt = [index for row in zip(*shares, strict=False) for index in row]
    assert dealt[: 24 - 2 * saved_by] == order[2 * saved_by :]


class Full(checkpoint.Files):
    def sync(self, file: BinaryIO) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_rank_0s_failure_is_everyones(tmp_path: Path) -> None:
    def run(group: dist.ProcessGroup) -> tuple[type, str]:
        first = checkpoint.save(tmp_path, {}, step=1, process_group=group)
        failed = outcome(lambda: checkpoint.save(tmp_path, {}, step=2, process_group=group, files=Full()))
        assert checkpoint.latest(tmp_path, process_group=group) == first
        return failed

    [first, *others] = thread_ranks(run, 3)
    assert others == [first, first]
    assert first[0] is CheckpointError
    assert first[1].startswith("rank 0: cannot write the checkpoint of step 2")
    assert "No space left on device" in first[1]


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_one_ranks_state_that_cannot_be_taken_is_everyones_failure(tmp_path: Path, failing_rank: int) -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("out of reach")

    def run(group: dist.ProcessGroup) -> tuple[type, str]:
        value = Broken() if group.rank() == failing_rank else 3
        return outcome(lambda: checkpoint.save(tmp_path, {"a": value}, step=1, process_group=group))

    expected = (CheckpointError, f"rank {failing_rank}: RuntimeError: out of reach")
    assert thread_ranks(run, 2) == [expected] * 2
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_disagree(tmp_path: Path) -> None:
    def steps(group: dist.ProcessGroup) -> tuple[type, str]:
        return outcome(lambda: checkpoint.save(tmp_path, {}, step=group.rank(), process_group=group))

    def names(group: dist.ProcessGroup) -> tuple[type, str]:
        state = {f"a{group.rank()}": 1}
        return outcome(lambda: checkpoint.save(tmp_path, state, step=1, process_group=group))

    def random_states(group: dist.ProcessGroup) -> tuple[type, str]:
        wanted = group.rank() == 0
        return outcome(
            lambda: checkpoint.save(tmp_path, {}, step=1, process_group=group, random_states=wanted)
        )

    for disagree, difference in {
        steps: "step 1, and rank 0 step 0",
        names: "names ['a1'], and rank 0 names ['a0']",
        random_states: "random_states False, and rank 0 random_states True",
    }.items():
        message = f"rank 1 saves {difference}: all ranks must save the same"
        assert thread_ranks(disagree, 2) == [(CheckpointError, message)] * 2
    assert list(tmp_path.iterdir()) == []


def test_loading_fails_alike_everywhere(tmp_path: Path) -> None:
    def missing(group: dist.ProcessGroup) -> tuple[type, str]:
        return outcome(lambda: checkpoint.load(tmp_path / "absent", {}, process_group=group))

    [first, *others] = thread_ranks(missing, 3)
    assert others == [first, first]
    assert first[0] is CheckpointNotFoundError

    path = checkpoint.save(tmp_path, {"model": nn.Linear(2, 2)}, step=1)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)

    def altered(group: dist.ProcessGroup) -> tuple[type, str]:
        return outcome(lambda: checkpoint.load(tmp_path, {"model": nn.Linear(2, 2)}, process_group=group))

    [first, *others] = thread_ranks(altered, 3)
    assert others == [first, first]
    assert first[0] is CheckpointCorruptError
    assert first[1].startswith(str(path / "model.safetensors"))


def test_a_model_that_does_not_fit_on_one_rank_is_loaded_on_none(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"model": nn.Linear(2, 2)}, step=1)

    def run(group: dist.ProcessGroup) -> tuple[tuple[type, str], bool]:
        model = nn.Linear(2, 2 + group.rank() // 2)
        before = model.weight.clone()
        failed = outcome(lambda: checkpoint.load(tmp_path, {"model": model}, process_group=group))
        return failed, torch.equal(before, model.weight)

    results = thread_ranks(run, 3)
    assert {untouched for _, untouched in results} == {True}
    [(kind, message)] = {failed for failed, _ in results}
    assert kind is CheckpointError
    assert message.startswith(
        "rank 2: 'model' in the checkpoint is not of this model: of another shape: weight"
    )


def test_latest_is_rank_0s_answer(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "0", {}, step=1)
    checkpoint.save(tmp_path / "1", {}, step=2)

    def run(group: dist.ProcessGroup) -> Path | None:
        return checkpoint.latest(tmp_path / str(group.rank()), process_group=group)

    assert thread_ranks(run, 2) == [tmp_path / "0" / "step-000000001"] * 2


def test_a_resumed_run_cuts_its_sums_as_the_one_it_continues(tmp_path: Path) -> None:
    def run(group: dist.ProcessGroup) -> tuple[bool, tuple[str, ...]]:
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        small = DistributedDataParallel(net, process_group=group, bucket_cap_mb=1e-4)
        assert len(small.bucket_plan.buckets) > 1
        checkpoint.save(tmp_path, {"model": small}, step=1, process_group=group)
        again = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        large = DistributedDataParallel(again, process_group=group)
        assert len(large.bucket_plan.buckets) == 1
        checkpoint.load(tmp_path, {"model": large}, process_group=group)
        followed = large.bucket_plan == small.bucket_plan
        again[0].requires_grad_(False)
        frozen = DistributedDataParallel(again, process_group=group)
        loaded = checkpoint.load(tmp_path, {"model": frozen}, process_group=group)
        return followed, loaded.notes

    with pytest.warns(RuntimeWarning, match="its buckets are made anew"):
        results = thread_ranks(run, 2)
    for followed, notes in results:
        assert followed
        assert notes == ("'model' trains other parameters than when it was saved: its buckets are made anew",)
