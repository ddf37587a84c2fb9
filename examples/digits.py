"""Train a small network on scikit-learn's handwritten digits, save it, load it and evaluate it again.

samestep run --nproc 2 examples/digits.py    # on 2 processes
python examples/digits.py                    # on 1, without a launcher
"""

import argparse
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

import samestep


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def load_data() -> tuple[Dataset, Dataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    everything = TensorDataset(images, torch.tensor(digits.target))
    return random_split(everything, [0.8, 0.2], torch.Generator().manual_seed(0))


@torch.no_grad()
def accuracy(model: nn.Module, dataset: Dataset, device: torch.device) -> float:
    """The share of `dataset` that `model` gets right; every sample counts once, on whatever rank it is."""
    model.eval()
    sampler = samestep.DistributedSampler(dataset, shuffle=False, mode="exact")
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for images, labels in DataLoader(dataset, batch_size=256, sampler=sampler):
        right = model(images.to(device)).argmax(1) == labels.to(device)
        counts += torch.stack([right.sum(), torch.tensor(len(labels), device=device)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="times through the data (default: 30)")
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together (default: 64)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default: 0.002)")
    parser.add_argument("--dir", type=Path, default=Path("runs/digits"), help="for checkpoints (runs/digits)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --dir")
    args = parser.parse_args()

    with samestep.World(seed=0) as world:
        train_set, test_set = load_data()
        model = samestep.DistributedDataParallel(make_model().to(world.device))
        loss_of = nn.CrossEntropyLoss()
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        sampler = samestep.DistributedSampler(train_set)
        loader = DataLoader(train_set, batch_size=max(1, args.batch_size // world.size), sampler=sampler)

        # All that a resumed run needs. Every rank calls save; rank 0 writes.
        state = {"model": model, "optimizer": optimizer, "sampler": sampler}
        checkpoint = samestep.checkpoint.latest(args.dir) if args.resume else None
        step = samestep.checkpoint.load(checkpoint, state).step if checkpoint else 0
        if checkpoint is None and world.is_main:  # a new run: those of an older one would be in the way
            for old in args.dir.glob("step-*"):
                shutil.rmtree(old)

        num_samples, start_s = 0, time.perf_counter()
        epochs = range(sampler.epoch, args.epochs)
        with samestep.progress(total=len(epochs) * len(loader)) as bar:
            for epoch in epochs:
                bar.description = f"epoch {epoch + 1}/{args.epochs}"
                model.train()
                for images, labels in loader:
                    optimizer.zero_grad()
                    loss = loss_of(model(images.to(world.device)), labels.to(world.device))
                    loss.backward()  # gradients are now the average over all ranks
                    optimizer.step()
                    step += 1
                    num_samples += len(labels) * world.size
                    bar.show(loss=loss)
                    bar.advance()
                checkpoint = samestep.checkpoint.save(args.dir, state, step=step)
        train_s = time.perf_counter() - start_s
        trained = accuracy(model, test_set, world.device)

        # Proof that all is on the disk: a new model, filled from the checkpoint, is as good.
        fresh = make_model().to(world.device)
        samestep.checkpoint.load(checkpoint, {"model": fresh}, random_states=False)
        loaded = accuracy(fresh, test_set, world.device)

        if world.is_main:
            table = Table(title="handwritten digits", show_header=False)
            table.add_row("ranks", f"{world.size} ({dist.get_backend()}, {world.device.type})")
            table.add_row("epochs", f"{args.epochs} ({step} steps)")
            table.add_row("training", f"{train_s:.1f} s, {num_samples / train_s:,.0f} samples/s")
            table.add_row("checkpoint", str(checkpoint))
            table.add_row("test accuracy", f"{trained:.2%}")
            table.add_row("test accuracy, loaded", f"{loaded:.2%}")
            Console().print(table)


if __name__ == "__main__":
    main()
