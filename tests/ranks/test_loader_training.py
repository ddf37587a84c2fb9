"""The loader and the wrapper together: the gradient of the global batch, however it was cut, on any W."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from samestep import checkpoint
from samestep.data import DataLoader
from samestep.gathering import gather
from samestep.gradients import DistributedDataParallel
from samestep.testing import thread_ranks
from samestep.virtual import VirtualRanks, virtual_ranks

_GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(23, 3, generator=_GENERATOR, dtype=torch.float64)
TARGETS = torch.randn(23, 1, generator=_GENERATOR, dtype=torch.float64)
FIRST_WEIGHT = torch.tensor([[0.1, -0.2, 0.3]], dtype=torch.float64)
DATA = TensorDataset(INPUTS, TARGETS, torch.arange(23))


def model_of(group: dist.ProcessGroup) -> DistributedDataParallel:
    layer = nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(FIRST_WEIGHT)
        layer.bias.zero_()
    return DistributedDataParallel(layer, process_group=group)


def loader_of(group: dist.ProcessGroup, virtual_size: int | None, **options: Any) -> DataLoader:
    virtual_ranks(group, attach=VirtualRanks(group.rank(), group.size(), virtual_size=virtual_size))
    return DataLoader(DATA, 2, shuffle=True, process_group=group, **options)


def gradients_of_joined_batches(samples: list[list[int]]) -> list[torch.Tensor]:
    """What one process gets for each of these global batches: their mean's gradient at the first weights."""
    found = []
    for indices in samples:
        weight = FIRST_WEIGHT.clone().requires_grad_()
        nn.functional.mse_loss(INPUTS[indices] @ weight.T, TARGETS[indices]).backward()
        found.append(weight.grad)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(("virtual_size", "world_size"), [(4, 1), (4, 2), (4, 3), (3, 3)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_steps_gradient_is_that_of_its_global_batch(
    virtual_size: int, world_size: int, accumulation: int
) -> None:
    def train(group: dist.ProcessGroup) -> Any:
        loader = loader_of(group, virtual_size, accumulation=accumulation)
        model = model_of(group)
        samples, gradients = [], []
        for step in loader:
            seen = []
            for x, y, index in step:
                nn.functional.mse_loss(model(x), y).backward()
                assert loader.virtual.current is not None
                seen += index.tolist() if loader.virtual.current.weight else []
            samples.append(seen)
            gradients.append(model.module.weight.grad.clone())
            model.zero_grad()
        return samples, gradients

    ranks = thread_ranks(train, world_size)
    steps = [[i for samples, _ in ranks for i in samples[k]] for k in range(len(ranks[0][0]))]
    assert sorted(index for step in steps for index in step) == list(range(23))
    expected = gradients_of_joined_batches(steps)
    for _, gradients in ranks:
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_a_plain_loop_is_exact_too() -> None:
    def train(group: dist.ProcessGroup) -> Any:
        loader, model = loader_of(group, None), model_of(group)
        samples, gradients = [], []
        for x, y, index in loader:
            nn.functional.mse_loss(model(x), y).backward()
            assert loader.virtual.current is not None
            samples.append(index.tolist() if loader.virtual.current.weight else [])
            gradients.append(model.module.weight.grad.clone())
            model.zero_grad()
        return samples, gradients

    ranks = thread_ranks(train, 4)  # the last step has 7 samples for 4 ranks
    steps = [[i for samples, _ in ranks for i in samples[k]] for k in range(3)]
    expected = gradients_of_joined_batches(steps)
    for _, gradients in ranks:
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_a_run_changes_its_processes_in_mid_epoch_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    def train(group: dist.ProcessGroup, path: Path | None, num_steps: int, save: Path | None) -> Any:
        loader, model = loader_of(group, 4), model_of(group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        if path is not None:
            checkpoint.load(path, state, process_group=group, random_states=False)
        done = 0
        while done < num_steps:
            for step in loader:
                for x, y, _ in step:
                    nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if done == num_steps:
                    break
        if save is not None:
            checkpoint.save(save, state, step=done, process_group=group, random_states=False)
        return [p.detach().clone() for p in model.parameters()]

    def bits(ranks: list[Any]) -> list[bytes]:
        return [b"".join(p.numpy().tobytes() for p in parameters) for parameters in ranks]

    [alone] = bits(thread_ranks(train, 1, None, 10, None))
    thread_ranks(train, 4, None, 1, tmp_path / "a")
    thread_ranks(train, 2, tmp_path / "a", 3, tmp_path / "b")
    thread_ranks(train, 3, tmp_path / "b", 4, tmp_path / "c")
    assert bits(thread_ranks(train, 1, tmp_path / "c", 2, None)) == [alone]
    assert bits(thread_ranks(train, 3, None, 10, None)) == [alone] * 3


def test_evaluation_counts_each_sample_once_and_gathers_in_order() -> None:
    def evaluate(group: dist.ProcessGroup) -> Any:
        loader = DataLoader(DATA, 5, mode="evaluate", process_group=group)
        model = model_of(group).eval()
        with torch.no_grad():
            results = [{"prediction": model(x), "target": y, "index": i} for x, y, i in loader]
        return gather(results, group, of=loader)

    [alone] = thread_ranks(evaluate, 1)
    assert alone["index"].tolist() == list(range(23))
    assert torch.equal(alone["target"], TARGETS)
    for world_size in (2, 3, 6):
        for value in thread_ranks(evaluate, world_size):
            assert all(torch.equal(value[name], alone[name]) for name in alone)
