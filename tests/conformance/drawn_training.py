"""Small trainings that hypothesis draws: model, graph, freezing, accumulation, dtype, ranks.

A training is played on ranks, each with its rows of the batch, or by one process on all rows.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

_RNG_LOCK = threading.Lock()  # ranks that are threads share torch's one random stream
_WIDTH = 8
_ROWS = 2  # of each rank in each micro-batch
Gradients = list[Tensor | None]

BLOCKS = ("linear", "layer_norm", "batch_norm", "twice", "tied", "unused", "switch", "switch_by_rank")


@dataclass(frozen=True)
class Training:
    """What to train, and how."""

    stem: str  # "linear", "conv" or "embedding"
    blocks: tuple[str, ...]
    frozen: frozenset[int]  # indices of parameters, counted round
    dtype: torch.dtype
    num_steps: int
    num_micro_batches: int
    set_to_none: bool
    gradient_as_bucket_view: bool
    bucket_cap_mb: float | None
    seed: int

    @property
    def find_unused_parameters(self) -> bool:
        """Whether torch's class must be told that a backward does not reach every parameter."""
        return any(block.startswith(("unused", "switch")) for block in self.blocks)

    @property
    def depends_on_batch_size(self) -> bool:
        """Whether a row's output depends on the other rows, so that no one process computes the same."""
        return "batch_norm" in self.blocks

    def make_model(self) -> DrawnModel:
        """The model, of equal values wherever it is made."""
        with _RNG_LOCK, torch.random.fork_rng():
            torch.manual_seed(self.seed)
            model = DrawnModel(self.stem, self.blocks).to(self.dtype)
        parameters = list(model.body_parameters())
        for index in self.frozen:
            parameters[index % len(parameters)].requires_grad_(False)
        return model

    def batch(self, micro_step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of `rank` in a micro-batch."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * micro_step + rank)
        if self.stem == "embedding":
            inputs = torch.randint(0, 9, (_ROWS, 3), generator=generator)
        else:
            inputs = torch.randn(_ROWS, 6, generator=generator, dtype=torch.float64).to(self.dtype)
        targets = torch.randn(_ROWS, 3, generator=generator, dtype=torch.float64).to(self.dtype)
        return inputs, targets


class DrawnModel(nn.Module):
    """A stem, blocks one after another, a head; parameters of the head always train."""

    def __init__(self, stem: str, blocks: tuple[str, ...]) -> None:
        super().__init__()
        if stem == "conv":
            self.stem: nn.Module = nn.Conv1d(1, 2, 3)
        else:
            self.stem = nn.Embedding(9, _WIDTH) if stem == "embedding" else nn.Linear(6, _WIDTH)
        self.names = blocks
        self.blocks = nn.ModuleList(self._block(name) for name in blocks)
        first = next((block for block in self.blocks if isinstance(block, nn.Linear)), None)
        for name, block in zip(blocks, self.blocks, strict=True):
            if name == "tied" and first is not None:
                block.weight = first.weight
        self.head = nn.Linear(_WIDTH, 3)

    @staticmethod
    def _block(name: str) -> nn.Module:
        if name == "layer_norm":
            return nn.LayerNorm(_WIDTH)
        if name == "batch_norm":
            return nn.BatchNorm1d(_WIDTH)
        if name.startswith("switch"):
            return nn.ModuleList([nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)])
        return nn.Linear(_WIDTH, _WIDTH)

    def body_parameters(self) -> Iterator[nn.Parameter]:
        """All parameters but the head's."""
        yield from self.stem.parameters()
        yield from self.blocks.parameters()

    def forward(self, x: Tensor, micro_step: int, rank: int) -> Tensor:
        x = self.stem(x.unsqueeze(1)).flatten(1) if isinstance(self.stem, nn.Conv1d) else self.stem(x)
        if isinstance(self.stem, nn.Embedding):
            x = x.mean(1)
        for name, block in zip(self.names, self.blocks, strict=True):
            if name == "unused":
                continue
            if name.startswith("switch"):
                turn = micro_step + (rank if name == "switch_by_rank" else 0)
                block = block[turn % 2]  # type: ignore[index]
            x = torch.tanh(block(x))
            if name == "twice":
                x = torch.tanh(block(x))
        return self.head(x)


def trainings(dtypes: tuple[torch.dtype, ...]) -> st.SearchStrategy[Training]:
    """Trainings with parameters of one of `dtypes`."""
    return st.builds(
        Training,
        stem=st.sampled_from(["linear", "conv", "embedding"]),
        blocks=st.lists(st.sampled_from(BLOCKS), max_size=4).map(tuple),
        frozen=st.frozensets(st.integers(0, 9), max_size=3),
        dtype=st.sampled_from(dtypes),
        num_steps=st.integers(1, 4),
        num_micro_batches=st.integers(1, 3),
        set_to_none=st.booleans(),
        gradient_as_bucket_view=st.booleans(),
        bucket_cap_mb=st.sampled_from([None, 0.0001, 0.0005]),
        seed=st.integers(0, 999),
    )


def train_replica(training: Training, wrap: Callable[..., Any], rank: int, **options: Any) -> list[Gradients]:
    """The gradients after each step on this rank, its replica wrapped by `wrap(module, **options)`.

    Ranks: all of the group that `wrap` is to use.
    """
    model = wrap(training.make_model(), **options)

    def backward(micro_step: int) -> None:
        inputs, targets = training.batch(micro_step, rank)
        nn.functional.mse_loss(model(inputs, micro_step, rank), targets).backward()

    return _train(training, list(model.parameters()), backward, model.no_sync)


def train_joined(training: Training, world_size: int) -> list[Gradients]:
    """The gradients after each step in one process that has the rows of all ranks."""
    model = training.make_model()

    def backward(micro_step: int) -> None:
        losses = []
        for rank in range(world_size):
            inputs, targets = training.batch(micro_step, rank)
            losses.append(nn.functional.mse_loss(model(inputs, micro_step, rank), targets))
        (torch.stack(losses).sum() / world_size).backward()

    return _train(training, list(model.parameters()), backward, nullcontext)


def _train(
    training: Training,
    parameters: list[nn.Parameter],
    backward: Callable[[int], None],
    no_sync: Callable[[], AbstractContextManager[Any]],
) -> list[Gradients]:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    history: list[Gradients] = []
    for step in range(training.num_steps):
        optimizer.zero_grad(set_to_none=training.set_to_none)
        for micro in range(training.num_micro_batches):
            is_last = micro == training.num_micro_batches - 1
            with nullcontext() if is_last else no_sync():
                backward(step * training.num_micro_batches + micro)
        history.append([None if p.grad is None else p.grad.detach().clone() for p in parameters])
        optimizer.step()
    return copy.deepcopy(history)
