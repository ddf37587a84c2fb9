"""Trainings that hypothesis draws: samestep's gradients are those of torch's class, and of one process."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from samestep import DistributedDataParallel
from samestep.testing import process_ranks, thread_ranks
from tests.conformance.drawn_training import Gradients, Training, train_joined, train_replica, trainings

# Largest difference allowed, relative to the largest gradient of the step.
_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 4e-2}
_DTYPES = tuple(_TOLERANCE)
_SETTINGS = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def differences(ours: list[Gradients], others: list[Gradients], tolerance: float) -> list[str]:
    """Where two histories of gradients differ by more than `tolerance`; 0 compares bits."""
    found = []
    for step, (mine, theirs) in enumerate(zip(ours, others, strict=True)):
        largest = max((float(g.abs().max()) for g in theirs if g is not None), default=0.0)
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if a is None or b is None:
                if a is not b:
                    found.append(f"step {step}, parameter {index}: {a} is not {b}")
                continue
            gap = float((a.double() - b.double()).abs().max())
            if gap > tolerance * max(largest, 1.0) or (tolerance == 0 and not torch.equal(a, b)):
                found.append(f"step {step}, parameter {index}: gap {gap:.2e}, largest gradient {largest:.2e}")
    return found


def digest(history: list[Gradients]) -> str:
    """Equal for equal bits."""
    code = hashlib.sha256()
    for gradients in history:
        for gradient in gradients:
            code.update(
                b"none" if gradient is None else gradient.view(-1).view(torch.uint8).numpy().tobytes()
            )
    return code.hexdigest()


def _draw(num_trainings: int) -> list[Training]:
    drawn: list[Training] = []

    @settings(_SETTINGS, max_examples=num_trainings)
    @given(trainings(_DTYPES))
    def draw(training: Training) -> None:
        drawn.append(training)

    draw()
    return drawn


def _against_torch(drawn: list[Training]) -> list[tuple[list[str], str]]:
    """For each training: where ours and torch's gradients differ on this rank, and a digest of ours."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = []
    for training in drawn:
        options = {
            "bucket_cap_mb": training.bucket_cap_mb,
            "gradient_as_bucket_view": training.gradient_as_bucket_view,
        }
        ours = train_replica(training, DistributedDataParallel, rank, **options)
        options["find_unused_parameters"] = training.find_unused_parameters
        torchs = train_replica(training, TorchDDP, rank, **options)
        # Two summands have one order; of more, torch's backend has another one than we.
        tolerance = 0.0 if world_size == 2 else _TOLERANCE[training.dtype]
        results.append((differences(ours, torchs, tolerance), digest(ours)))
    return results


# One set of processes plays all trainings, because torch's class makes each one import torch._dynamo.
@pytest.mark.parametrize(("world_size", "num_trainings"), [(2, 30), (3, 12)])
def test_gradients_are_those_of_torchs_class(world_size: int, num_trainings: int) -> None:
    drawn = _draw(num_trainings)
    by_rank = process_ranks(_against_torch, world_size, drawn, timeout=100.0)
    for training, *results in zip(drawn, *by_rank, strict=True):
        assert [found for found, _ in results] == [[]] * world_size, training
        assert len({code for _, code in results}) == 1, f"ranks differ: {training}"


@settings(_SETTINGS, max_examples=40)
@given(trainings(_DTYPES), st.sampled_from([2, 3, 4]))
def test_gradients_are_those_of_one_process_on_the_joined_batch(training: Training, world_size: int) -> None:
    def train(group: dist.ProcessGroup) -> list[Gradients]:
        return train_replica(
            training,
            DistributedDataParallel,
            group.rank(),
            process_group=group,
            bucket_cap_mb=training.bucket_cap_mb,
        )

    histories = thread_ranks(train, world_size)
    assert len({digest(history) for history in histories}) == 1, "ranks differ"
    if not training.depends_on_batch_size:
        joined = train_joined(training, world_size)
        assert differences(histories[0], joined, _TOLERANCE[training.dtype]) == []
