"""What every test relies on: the environment is restored, and no test waits on another's ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _environment_restored() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True, scope="session")
def _one_thread_per_rank() -> None:
    # Ranks as threads share two cores; more intra-op threads only get in each other's way.
    torch.set_num_threads(1)
