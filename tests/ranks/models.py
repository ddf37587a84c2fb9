"""Small real models for tests of gradients, and the joined batch that one process would see."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

_RNG_LOCK = threading.Lock()  # ranks that are threads share torch's one random stream


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 4, 3, stride=2, padding=1), nn.GELU()
        )
        self.head = nn.Linear(4 * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x.view(-1, 2, 6, 6)).flatten(1))


class Transformer(nn.Module):
    """Embedding tied to the head, learned positions, two encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.positions = nn.Parameter(torch.zeros(7, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x) + self.positions))


MODELS = {"mlp": Mlp, "conv": ConvNet, "transformer": Transformer}


def batch_for(name: str, num_samples: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one global batch."""
    generator = torch.Generator().manual_seed(seed)
    if name == "transformer":
        tokens = torch.randint(0, 11, (num_samples, 8), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    width = 6 if name == "mlp" else 72
    inputs = torch.randn(num_samples, width, generator=generator, dtype=dtype)
    return inputs, torch.randint(0, 3, (num_samples,), generator=generator)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy."""
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def make(name: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """A model with the same values for the same seed."""
    with _RNG_LOCK, torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[name]().to(dtype)
