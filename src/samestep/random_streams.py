"""This process's random streams (torch's, numpy's and Python's): seeded, kept, and put back."""

from __future__ import annotations

import random

import numpy as np
import torch

__all__ = ["KeptStreams", "seed_streams"]

_CPU = torch.device("cpu")


def seed_streams(sequence: np.random.SeedSequence) -> None:
    """All streams, those of every accelerator too, begin anew."""
    words = sequence.generate_state(3, dtype=np.uint64)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]) % 2**32)
    torch.manual_seed(int(words[2]) >> 1)  # torch's seeds are signed


class KeptStreams:
    """The streams as they were at some moment; as a `with` block, they are after it as before it.

    Args:
        device: whose stream is kept beside that of torch's CPU.
    """

    def __init__(self, device: torch.device = _CPU) -> None:
        self._device = device

    def keep(self) -> KeptStreams:
        """Remember the streams as they are now."""
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.default_generator.get_state()
        if self._device.type != "cpu":
            self._on_device = torch.get_device_module(self._device).get_rng_state(self._device)
        return self

    def put_back(self) -> None:
        """The streams go on from where they were kept."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(self._on_device, self._device)

    def __enter__(self) -> None:
        self.keep()

    def __exit__(self, *_: object) -> None:
        self.put_back()
