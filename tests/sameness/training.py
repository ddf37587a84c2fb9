"""Training runs that are defined by V virtual ranks and a seed, and their bits after each step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import samestep
from samestep import checkpoint
from samestep.virtual import VirtualRanks, virtual_ranks

__all__ = ["Case", "cases", "play", "play_part"]

_SEED = 7
_BATCH = 4
NUM_STEPS = 4


@dataclass(frozen=True)
class Case:
    """One run: what is trained, how, and by how many virtual ranks."""

    model: str  # "mlp", "conv" or "transformer"
    optimizer: str  # "sgd" or "adamw"
    dtype: str  # "float32", or "bfloat16" under autocast
    virtual_size: int
    deterministic: bool = True  # False: the negative control, ranks that all-reduce their gradients

    def __str__(self) -> str:
        return f"{self.model} {self.optimizer} {self.dtype} V={self.virtual_size}"


def cases(virtual_sizes: tuple[int, ...] = (4, 8)) -> Iterator[Case]:
    """All of them."""
    for virtual_size in virtual_sizes:
        for model in ("mlp", "conv", "transformer"):
            for optimizer in ("sgd", "adamw"):
                for dtype in ("float32", "bfloat16"):
                    yield Case(model, optimizer, dtype, virtual_size)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 5))
        self.unused = nn.Linear(3, 3)  # by all

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x.view(-1, 2, 8, 8)).flatten(1))


class Transformer(nn.Module):
    """Dropout, and the embedding's weights tied to the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x)))


MODELS: dict[str, type[nn.Module]] = {"mlp": Mlp, "conv": ConvNet, "transformer": Transformer}


def batch_of(case: Case, step: int, position: int) -> tuple[Tensor, Tensor]:
    """One virtual rank's; the augmentation is drawn from the streams that are its own."""
    generator = torch.Generator().manual_seed(1000 * step + position)
    if case.model == "transformer":
        tokens = torch.randint(0, 17, (_BATCH, 9), generator=generator)
        return tokens[:, :-1].roll(np.random.randint(3), 1), tokens[:, 1:]
    width = 20 if case.model == "mlp" else 128
    inputs = torch.randn(_BATCH, width, generator=generator)
    return inputs + 0.1 * torch.randn(_BATCH, width), torch.randint(0, 5, (_BATCH,), generator=generator)


class Run:
    """A model and an optimizer, and one step after the other."""

    def __init__(self, case: Case, group: dist.ProcessGroup) -> None:
        self.case = case
        size = case.virtual_size if case.deterministic else None
        self.virtual = VirtualRanks(group.rank(), group.size(), virtual_size=size, seed=_SEED)
        virtual_ranks(group, attach=self.virtual)
        torch.manual_seed(_SEED)
        self.model = samestep.DistributedDataParallel(MODELS[case.model](), bucket_cap_mb=0.01)
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer
        if case.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)

    def step(self, number: int) -> None:
        """One micro-batch per virtual rank that this process plays, then the update."""
        self.optimizer.zero_grad()
        for position in range(*self.virtual.block):
            with (
                self.virtual.play(position, number),
                torch.autocast("cpu", torch.bfloat16, enabled=self.case.dtype == "bfloat16"),
            ):
                inputs, targets = batch_of(self.case, number, position)
                outputs = self.model(inputs).float().flatten(0, -2)
                nn.functional.cross_entropy(outputs, targets.flatten()).backward()
        samestep.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()

    def digest(self) -> str:
        """Of every bit of the model and the optimizer."""
        sha = hashlib.sha256()
        for value in _leaves([self.model.module.state_dict(), self.optimizer.state_dict()["state"]]):
            if isinstance(value, Tensor):
                sha.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            else:
                sha.update(repr(value).encode())
        return sha.hexdigest()


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield repr(key)
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def play(backend: str, address: str, todo: list[Case]) -> dict[Case, list[str]]:
    """The digests after each step of each case, on this rank of a process group over `backend`."""
    group = _group(backend, address)
    digests = {}
    for case in todo:
        run = Run(case, group)
        digests[case] = []
        for number in range(NUM_STEPS):
            run.step(number)
            digests[case].append(run.digest())
    return digests


def play_part(
    backend: str, address: str, todo: list[Case], folder: str, start: int, stop: int
) -> dict[Case, list[str]]:
    """As `play`, of the steps from `start` on, which continue the checkpoints in `folder`, to `stop`."""
    group = _group(backend, address)
    digests = {}
    for case in todo:
        place = Path(folder) / str(case).replace(" ", "-")
        run = Run(case, group)
        state = {"model": run.model, "optimizer": run.optimizer}
        if start:
            assert checkpoint.load(place, state, random_states=False).step == start
        digests[case] = []
        for number in range(start, stop):
            run.step(number)
            digests[case].append(run.digest())
        checkpoint.save(place, state, step=stop, random_states=False)
    return digests


def _group(backend: str, address: str) -> dist.ProcessGroup:
    if backend != "gloo":  # that one is there already
        dist.destroy_process_group()
        samestep.init_process_group(backend, init_method=address)
    group = dist.group.WORLD
    assert group is not None
    return group
