"""Train a small ResNet with SyncBatchNorm and a sharded optimizer to find digits in coloured scenes.

samestep run --nproc 2 examples/resnet.py    # a minute or two on 2 cores
python examples/resnet.py                    # on 1, without a launcher

The digits are the scanned ones of scikit-learn; each stands somewhere in a scene of 32 x 32 pixels.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import samestep


class Scenes(Dataset):
    """A digit of some colour and place before a coloured ground, with a piece of another digit behind it."""

    def __init__(self, *, train: bool) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        images = functional.interpolate(images, scale_factor=2, mode="bilinear")
        kept = (torch.arange(len(images)) % 5 != 0) == train  # every fifth is for the test
        self.images, self.labels = images[kept], torch.tensor(digits.target)[kept]
        self.train = train

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # Training scenes are new in each epoch: samestep's loader gives each sample its own random numbers.
        draw = None if self.train else torch.Generator().manual_seed(index)
        ground, dark, bright = torch.rand(3, 3, 1, 1, generator=draw) / 2
        scene = ground.expand(3, 32, 32).clone()
        other = int(torch.randint(len(self.images), (), generator=draw))
        scene[:, :8, :16] += self.images[other, :, :8] * dark
        y, x = torch.randint(17, (2,), generator=draw).tolist()
        there = scene[:, y : y + 16, x : x + 16]
        there += self.images[index] * (bright + 0.5 - there)
        return scene + 0.05 * torch.randn(3, 32, 32, generator=draw), self.labels[index]


class Block(nn.Module):
    """Two convolutions and a way around them (He et al., 2015)."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU(),
            nn.Conv2d(num_out, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out),
        )  # fmt: skip
        self.around = nn.Sequential()
        if stride > 1:
            self.around = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.around(x))


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, device: torch.device) -> float:
    """The share of the test scenes that `model` gets right; each counts once, on whatever rank it is."""
    model.eval()
    loader = samestep.DataLoader(Scenes(train=False), batch_size=64, mode="evaluate")
    right = [model(images.to(device)).argmax(1).cpu() == labels for images, labels in loader]
    everyones = samestep.gather(torch.cat(right), of=loader)
    return everyones.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="times through the data (default: 12)")
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together (default: 32)")
    parser.add_argument("--lr", type=float, default=0.2, help="the highest learning rate (default: 0.2)")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer (default: 16)")
    parser.add_argument("--dir", type=Path, default=Path("runs/resnet"), help="for checkpoints (runs/resnet)")
    args = parser.parse_args()

    with samestep.World(seed=0) as world:
        # Small batches per rank are no harm: statistics are those of the global batch.
        net = samestep.SyncBatchNorm.convert_sync_batchnorm(make_model(args.width).to(world.device))
        model = samestep.DistributedDataParallel(net)
        optimizer = samestep.ShardedOptimizer(
            model, torch.optim.SGD, lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        loader = samestep.DataLoader(
            Scenes(train=True), batch_size=max(1, args.batch_size // world.size), shuffle=True
        )
        num_steps = args.epochs * len(loader)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, args.lr, total_steps=num_steps, cycle_momentum=False
        )
        start_s = time.perf_counter()
        with samestep.progress(total=num_steps) as bar:
            for epoch in range(args.epochs):
                bar.description = f"epoch {epoch + 1}/{args.epochs}"
                model.train()
                for images, labels in loader:
                    loss = functional.cross_entropy(model(images.to(world.device)), labels.to(world.device))
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                    bar.show(loss=loss)
                    bar.advance()
        train_s = time.perf_counter() - start_s
        trained = accuracy(model, world.device)

        # The network as it was, with plain BatchNorm, takes the weights: it needs no process group.
        checkpoint = samestep.checkpoint.save(args.dir, {"model": model}, step=num_steps)
        plain = make_model(args.width).to(world.device)
        samestep.checkpoint.load(checkpoint, {"model": plain}, random_states=False)
        loaded = accuracy(plain, world.device)
        if world.is_main:
            print(f"{num_steps} steps on {world.size} ranks ({dist.get_backend()}) in {train_s:.1f} s")
            print(f"test accuracy: {trained:.2%}; loaded, with plain BatchNorm: {loaded:.2%}")


if __name__ == "__main__":
    main()
