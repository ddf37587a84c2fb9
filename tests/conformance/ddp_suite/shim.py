"""torch's distributed test-suite, imported so that its GPU tests run on CPU, and the classes in it exchanged.

The suite's own module sees `torch` through a facade: devices named "cuda" or by an integer are the CPU,
`torch.cuda`'s functions do nothing, and the classes under test have torch's names. What a test asserts is not
changed, and the classes under test see the real torch. Only a process that exists to run this suite may call
`import_suite`: its patches stay.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

SUITE = "torch.testing._internal.distributed.distributed_test"
TORCH_DDP: Any = torch.nn.parallel.DistributedDataParallel
TORCH_SYNC_BATCHNORM: Any = torch.nn.SyncBatchNorm
_CPU = torch.device("cpu")
_FACTORIES = ("arange", "as_tensor", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")
_HELPERS = ("torch.distributed.algorithms", "torch.distributed.optim")


def suite_path() -> Path:
    """The file of the suite in the installed torch; reading it imports nothing."""
    return Path(torch.__file__).parent / "testing/_internal/distributed/distributed_test.py"


def import_suite(world_size: int) -> types.ModuleType:
    """The suite's module, its skip decorators disarmed and its devices the CPU, for ranks of `world_size`."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(world_size),
        INIT_METHOD="file://",  # the suite then saves and loads models in the middle of training, too
        GLOO_SOCKET_IFNAME="lo",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
    )
    with _decorators_disarmed():
        suite = importlib.import_module(SUITE)
    # What tests import while they run is imported now, once, in the process that ranks are forked from.
    for name in ("torch._dynamo", "torch._inductor", "torch.distributed.tensor"):
        importlib.import_module(name)
    _move_to_cpu(suite, world_size)
    return suite


@contextlib.contextmanager
def _decorators_disarmed() -> Iterator[None]:
    """Decorators that skip for want of a GPU, or for what troubles torch's own CI, do nothing."""
    from torch.testing._internal import common_distributed, common_utils

    def keep(*_args: Any, **_kwargs: Any) -> Callable[[Any], Any]:
        return lambda test: test

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (common_distributed, "skip_if_lt_x_gpu"),
            (common_distributed, "nccl_skip_if_lt_x_gpu"),
            (common_distributed, "require_n_gpus_for_nccl_backend"),
            (common_utils, "skip_but_pass_in_sandcastle"),
            (common_utils, "skip_but_pass_in_sandcastle_if"),
            (unittest, "skip"),
            (unittest, "skipIf"),
        ):
            stack.enter_context(mock.patch.object(owner, name, keep))
        stack.enter_context(mock.patch.object(common_distributed, "skip_if_no_gpu", lambda test: test))
        yield


def exchange(suite: Any, ddp: Any, sync_batchnorm: Any) -> None:
    """The suite, and torch's helpers that it calls, find `ddp` and `sync_batchnorm` under torch's names."""
    suite.torch.nn.SyncBatchNorm = sync_batchnorm
    parallel = suite.torch.nn.parallel
    owners = [suite, parallel, parallel.distributed]
    owners += [module for name, module in sys.modules.items() if name.startswith(_HELPERS)]
    for owner in owners:
        for name, value in list(vars(owner).items()):
            if value is TORCH_DDP:
                setattr(owner, name, ddp)


def forget_device_ids(ddp: Any) -> None:
    """`ddp` is told device_ids=None and output_device=None, as models on CPU require of torch's class."""
    original = ddp.__init__

    @functools.wraps(original)
    def init(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        original(self, module, None, None, *args, **kwargs)

    ddp.__init__ = init


class _Facade(types.ModuleType):
    """A module that answers as `real` does, but for the names given."""

    def __init__(self, real: types.ModuleType, **replaced: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(_real=real, **replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


class _Stream:
    """Stands for a stream or an event on which everything has been done already."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def wait(self, *_args: Any, **_kwargs: Any) -> None: ...

    record = synchronize = wait_event = wait_stream = wait


class _NestedBatchNorm(torch.nn.Module):
    """Stands for torchvision's ResNet-50: a BatchNorm two containers down, at `layer1[0].bn1`."""

    def __init__(self) -> None:
        super().__init__()
        block = torch.nn.Sequential()
        block.add_module("bn1", torch.nn.BatchNorm2d(4))
        self.layer1 = torch.nn.Sequential(block)


def _move_to_cpu(suite: Any, world_size: int) -> None:
    current = {"device": 0}
    cuda = _Facade(
        torch.cuda,
        Stream=_Stream,
        current_device=lambda: current["device"],
        current_stream=_Stream,
        device_count=lambda: world_size,
        manual_seed=lambda _seed: None,
        set_device=lambda device: current.update(device=device),
        stream=lambda _stream: contextlib.nullcontext(),
        synchronize=lambda device=None: None,
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    factories["ones"] = _of_bearable_size(factories["ones"])
    # The suite loads only what it has saved itself: whole models, and the state of hooks.
    load = functools.partial(torch.load, weights_only=False)
    distributed = _Facade(torch.nn.parallel.distributed, DistributedDataParallel=TORCH_DDP)
    parallel = _Facade(torch.nn.parallel, DistributedDataParallel=TORCH_DDP, distributed=distributed)
    suite.nn = _Facade(torch.nn, parallel=parallel)
    suite.torch = _Facade(torch, cuda=cuda, device=_device, load=load, nn=suite.nn, **factories)
    suite.init_multigpu_helper = lambda world_size, _backend: {rank: [rank] for rank in range(world_size)}
    suite.autocast = functools.partial(torch.autocast, "cpu")
    suite.GradScaler = functools.partial(torch.amp.GradScaler, "cpu")
    suite.torchvision = types.SimpleNamespace(models=types.SimpleNamespace(resnet50=_NestedBatchNorm))
    suite.HAS_TORCHVISION = False  # where it is True, a ResNet-50 trains on images of 1000 x 1000

    for owner in (torch.Tensor, torch.nn.Module):
        owner.cuda = lambda self, *_args, **_kwargs: self
        owner.to = _on_cpu(owner.to, position=1)
    mesh: Any = importlib.import_module("torch.distributed.device_mesh")
    mesh.init_device_mesh = _on_cpu(mesh.init_device_mesh, position=0)

    # torch's own class and its hooks copy, step and cast on side streams; a CPU has none.
    hooks = "torch.distributed.algorithms.ddp_comm_hooks"
    accelerator = _Facade(torch.accelerator, current_stream=_Stream)
    for name in (TORCH_DDP.__module__, f"{hooks}.mixed_precision_hooks", f"{hooks}.optimizer_overlap_hooks"):
        module: Any = importlib.import_module(name)
        module.torch = _Facade(torch, Stream=_Stream, Event=_Stream, accelerator=accelerator)


def _is_gpu(value: Any) -> bool:
    """Whether `value`, in the place of a device, names a GPU."""
    if isinstance(value, str):
        return value.split(":")[0] == "cuda"
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, int) and not isinstance(value, bool)


def _device(*args: Any) -> torch.device:
    return _CPU if _is_gpu(args[0]) else torch.device(*args)


def _on_cpu(function: Any, position: int | None = None) -> Any:
    """`function`, its argument "device" (by keyword, or at `position`) the CPU where it was a GPU."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if position is not None and len(args) > position and _is_gpu(args[position]):
            args = (*args[:position], "cpu", *args[position + 1 :])
        return function(*args, **kwargs)

    return on_cpu


def _of_bearable_size(ones: Any) -> Any:
    """`ones`, whose images of 1000 x 1000 (a TFLOP a step in the model they are for) become 24 x 24."""

    @functools.wraps(ones)
    def smaller(*size: Any, **kwargs: Any) -> Any:
        if len(size) == 4 and size[2:] == (1000, 1000):
            size = (*size[:2], 24, 24)
        return ones(*size, **kwargs)

    return smaller
