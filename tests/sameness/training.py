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
_BATCH_SIZE = 4  # of a micro-batch
_NUM_SAMPLES = 44  # the last step of an epoch is short, and its virtual ranks' shares are uneven
NUM_STEPS = 4  # more than an epoch


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


class Samples:
    """A data set; each sample is augmented with random numbers, which are its own."""

    def __init__(self, model: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self._is_text = model == "transformer"
        self._targets = torch.randint(0, 5, (_NUM_SAMPLES,), generator=generator)
        self._tokens = torch.randint(0, 17, (_NUM_SAMPLES, 9), generator=generator)
        self._inputs = torch.randn(_NUM_SAMPLES, 20 if model == "mlp" else 128, generator=generator)

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._is_text:
            tokens = self._tokens[index].roll(np.random.randint(3))
            return tokens[:-1], tokens[1:]
        return self._inputs[index] + 0.1 * torch.randn_like(self._inputs[index]), self._targets[index]


class Run:
    """A model and an optimizer, and one step after the other."""

    def __init__(self, case: Case, group: dist.ProcessGroup) -> None:
        self.case = case
        size = case.virtual_size if case.deterministic else None
        virtual = VirtualRanks(group.rank(), group.size(), virtual_size=size, seed=_SEED)
        virtual_ranks(group, attach=virtual)
        self.world = samestep.World(seed=_SEED)  # of the group that there is
        torch.manual_seed(_SEED)
        self.model = samestep.DistributedDataParallel(MODELS[case.model](), bucket_cap_mb=0.01)
        self.loader = samestep.DataLoader(
            Samples(case.model), _BATCH_SIZE, shuffle=True, accumulation=2 if case.model == "conv" else 1
        )
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer
        if case.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)

    def steps(self, number: int) -> Iterator[str]:
        """The digest after each of so many steps; epochs follow each other."""
        while number:
            for step in self.loader:
                losses = [self._loss(*batch) for batch in step]
                samestep.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
                yield self.digest(self.world.mean(losses))
                number -= 1
                if not number:
                    return

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.dtype == "bfloat16"):
            outputs = self.model(inputs).float().flatten(0, -2)
        loss = nn.functional.cross_entropy(outputs, targets.flatten())
        loss.backward()
        return loss.detach()

    def digest(self, loss: Tensor) -> str:
        """Of every bit of the model, the optimizer and the loss."""
        sha = hashlib.sha256()
        states = [self.model.module.state_dict(), self.optimizer.state_dict()["state"], loss]
        for value in _leaves(states):
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
        digests[case] = list(Run(case, group).steps(NUM_STEPS))
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
        state = {"model": run.model, "optimizer": run.optimizer, "loader": run.loader}
        if start:
            assert checkpoint.load(place, state, random_states=False).step == start
        digests[case] = list(run.steps(stop - start))
        checkpoint.save(place, state, step=stop, random_states=False)
    return digests


def _group(backend: str, address: str) -> dist.ProcessGroup:
    if backend != "gloo":  # that one is there already
        dist.destroy_process_group()
        samestep.init_process_group(backend, init_method=address)
    group = dist.group.WORLD
    assert group is not None
    return group
