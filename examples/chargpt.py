"""Train a character transformer on the source text of Python's standard library, then let it write.

samestep run --nproc 2 examples/chargpt.py              # a few minutes on 2 cores
samestep run --nproc 3 examples/chargpt.py --resume     # go on from the last checkpoint, on any number
"""

import argparse
import itertools
import math
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import samestep

CONTEXT = 64  # the number of characters that the model sees
# Newline and the printable ASCII characters; a character's number is its place among them.
ALPHABET = torch.tensor([10, *range(32, 127)], dtype=torch.uint8)


def standard_library() -> Tensor:
    """The standard library's modules of one file each, sorted by name: the same on every rank."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    ours = [f for f in files if f.stem in sys.stdlib_module_names and not f.stem.startswith("_")]
    return encode(re.sub(r"[^\n -~]", "", "\n".join(f.read_text(encoding="utf-8") for f in ours)))


def encode(text: str) -> Tensor:
    return torch.searchsorted(ALPHABET, torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8))


class CharTransformer(nn.Module):
    def __init__(self, width: int = 128, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.chars, self.places = nn.Embedding(len(ALPHABET), width), nn.Embedding(CONTEXT, width)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(ALPHABET)))

    def forward(self, chars: Tensor) -> Tensor:
        length = chars.size(1)
        x = self.chars(chars) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=chars.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validate(model: nn.Module, dataset: Tensor, device: torch.device) -> float:
    """The mean loss over `dataset`; every window counts once, on whatever rank it is."""
    sampler = samestep.DistributedSampler(dataset, shuffle=False, mode="exact")
    sums = torch.zeros(2, device=device)
    for windows in DataLoader(dataset, batch_size=64, sampler=sampler):
        loss = loss_of(model, windows.to(device))
        sums += torch.stack([loss, torch.ones_like(loss)]) * len(windows)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def write(model: CharTransformer, prompt: str, length: int) -> str:
    chars = encode(prompt).to(model.places.weight.device).unsqueeze(0)
    for _ in range(length):
        odds = (model(chars[:, -CONTEXT:])[:, -1] / 0.7).softmax(1)
        chars = torch.cat([chars, torch.multinomial(odds, 1)], dim=1)
    return bytes(ALPHABET[chars[0].cpu()].tolist()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="optimizer steps (default: 800)")
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together (default: 32)")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate (default: 0.002)")
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints (default: 200)")
    parser.add_argument("--dir", type=Path, default=Path("runs/chargpt"), help="for them (runs/chargpt)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --dir")
    args = parser.parse_args()

    def lr_factor(step: int) -> float:  # 50 steps up, then along a cosine down to a tenth
        return min((step + 1) / 50, 0.55 + 0.45 * math.cos(math.pi * min(1, step / args.steps)))

    with samestep.World(seed=0) as world:
        text = standard_library()
        train_set = text[:-25_000].unfold(0, CONTEXT + 1, 1)  # a window for each character of the text
        valid_set = text[-25_000:].unfold(0, CONTEXT + 1, CONTEXT)
        sampler = samestep.DistributedSampler(train_set)
        loader = DataLoader(train_set, batch_size=max(1, args.batch_size // world.size), sampler=sampler)
        batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch

        model = samestep.DistributedDataParallel(CharTransformer().to(world.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)

        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "sampler": sampler}
        checkpoint = samestep.checkpoint.latest(args.dir) if args.resume else None
        start = samestep.checkpoint.load(checkpoint, state).step if checkpoint else 0
        if checkpoint is None and world.is_main:  # a new run: checkpoints of an older one are in the way
            for old in args.dir.glob("step-*"):
                shutil.rmtree(old)

        bar = samestep.progress(range(start + 1, args.steps + 1), description="training")
        bar.show(validation=validate(model, valid_set, world.device))
        for step in bar:
            windows = next(batches).to(world.device)
            optimizer.zero_grad()
            loss = loss_of(model, windows)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            sampler.consumed(len(windows))  # a resumed run goes on with the next one, in mid-epoch
            bar.show(loss=loss)
            if step % args.every == 0 or step == args.steps:
                samestep.checkpoint.save(args.dir, state, step=step)
                validation = validate(model, valid_set, world.device)
                bar.show(validation=validation)
                if world.is_main:
                    print(f"step {step}: loss {loss.item():.2f}, on text not seen {validation:.2f}")
        if world.is_main:
            print(write(model.module, "def ", 500))


if __name__ == "__main__":
    main()
