"""The models that steps are timed with: the batch, the loss, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Loss = Callable[[nn.Module], Tensor]
Maker = Callable[[torch.device], tuple[nn.Module, Loss]]


@dataclass(frozen=True)
class Workload:
    """What is timed: a model, and the loss of one batch of it."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]

    def make(self, device: torch.device) -> tuple[nn.Module, Loss]:
        """A model on `device`, and the function that gives its loss for a batch made now."""
        inputs, targets = (tensor.to(device) for tensor in self.batch())

        def loss_of(model: nn.Module) -> Tensor:
            outputs: Tensor = model(inputs)
            loss: Tensor = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
            return loss

        return self.build().to(device), loss_of


class Transformer(nn.Module):
    """3.3 M parameters: 4 layers of width 256 over 64 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 256)
        self.positions = nn.Parameter(torch.zeros(64, 256))
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.encoder(self.embedding(tokens) + self.positions))
        return outputs


class Block(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(),
            nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(num_out),
        )
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or num_in != num_out:
            self.skip = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.skip(x))


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32 x 32."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    width = 64
    for stage, num_out in enumerate((64, 128, 256, 512)):
        for block in range(2):
            layers.append(Block(width, num_out, 2 if stage and not block else 1))
            width = num_out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def mlp() -> nn.Module:
    widths = (1024, 1600, 1600, 1024, 512)
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b), nn.GELU())))


def many_small() -> nn.Module:
    """1,000 parameters of 16 to 256 elements: what counts is the time per parameter."""
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(500)))


def _images(num: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num, 3, 32, 32), torch.randint(10, (num,))


def _tokens(num: int) -> tuple[Tensor, Tensor]:
    return torch.randint(128, (num, 64)), torch.randint(128, (num, 64))


WORKLOADS = {
    "mlp": Workload("MLP, 6.4 M x batch 32", mlp, lambda: (torch.randn(32, 1024), torch.randint(512, (32,)))),
    "transformer": Workload("transformer, 3.3 M x batch 16 x 64", Transformer, lambda: _tokens(16)),
    "resnet": Workload("ResNet-18, 11.2 M x batch 16 x 32 x 32", resnet18, lambda: _images(16)),
    "small": Workload(
        "1,000 parameters of 16 to 256", many_small, lambda: (torch.randn(8, 16), torch.randint(16, (8,)))
    ),
}
