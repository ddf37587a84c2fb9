"""What every test relies on: the environment is restored, and no test waits on another's ranks."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from samestep.testing import PRELOAD

# What rank processes of these tests import besides: seconds each, so the server that forks them does it once.
_SLOW_IMPORTS = [
    "torch._dynamo",  # by every optimizer
    "samestep.checkpoint",
    "torch.distributed.optim",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
]


# How long an example takes is the machine's business; a test that hangs has its time-out.
settings.register_profile("samestep", deadline=None)
settings.load_profile("samestep")


@pytest.fixture(autouse=True)
def _environment_restored() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    # A shell starts what it runs in the background deaf to Ctrl-C, and the commands under test inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread_per_rank() -> None:
    # Ranks as threads share two cores; more intra-op threads only get in each other's way.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _rank_server() -> None:
    from multiprocessing.forkserver import ensure_running

    mp.get_context("forkserver").set_forkserver_preload([*PRELOAD, *_SLOW_IMPORTS])
    ensure_running()  # it imports while the first tests run
