"""The same weights, to the last bit, on any number of processes: run it with several and compare the lines.

samestep run --nproc 1 examples/same.py
samestep run --nproc 2 examples/same.py    # and 3, and 4: the run is defined by 4 virtual ranks
"""

import argparse
import hashlib

import torch
from torch import nn
from torch.utils.data import Dataset

import samestep

NUM_VIRTUAL_RANKS = 4


class NoisyPoints(Dataset):
    """Points on a spiral with two arms; each look at one adds other noise to it."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        arm, angle = index % 2, torch.tensor(index / 100.0)
        point = angle * torch.stack([torch.cos(angle + arm * torch.pi), torch.sin(angle + arm * torch.pi)])
        return point + 0.3 * torch.randn(2), arm


def sha256(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, help="times through the data (default: 3)")
    parser.add_argument("--workers", type=int, default=0, help="that load data, per process (default: 0)")
    args = parser.parse_args()

    torch.set_num_threads(1)  # sums inside of an operation depend on it
    with samestep.World(virtual_size=NUM_VIRTUAL_RANKS, seed=0) as world:
        net = nn.Sequential(
            nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2),
        )  # fmt: skip
        model = samestep.DistributedDataParallel(net.to(world.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = samestep.DataLoader(NoisyPoints(), batch_size=16, shuffle=True, num_workers=args.workers)

        for _ in range(args.epochs):
            for step in loader:  # 64 samples on all processes together, 40 in the last one
                for points, arms in step:  # 16 of each virtual rank that this process plays
                    logits = model(points.to(world.device))
                    nn.functional.cross_entropy(logits, arms.to(world.device)).backward()
                optimizer.step()
                optimizer.zero_grad()

        if world.is_main:
            state = optimizer.state_dict()["state"].values()
            moments = [value for values in state for value in values.values()]
            print(f"{world.size} processes played {NUM_VIRTUAL_RANKS} virtual ranks, {args.epochs} epochs")
            print(f"parameters and buffers  {sha256([*net.parameters(), *net.buffers()])}")
            print(f"optimizer state         {sha256(moments)}")


if __name__ == "__main__":
    main()
