"""What the bits of a sum depend on, beside its numbers and their order: recorded with a run, and compared.

A promise of equal bits holds on equal hardware, with equal software and equal numbers of threads: kernels
choose by them how to cut their sums.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["arithmetic_of_this_process", "cpu_model", "differences", "set_up"]

_NAMES = {
    "torch": "torch's version",
    "cpu": "the CPU",
    "cpu_capability": "the CPU's vector instructions",
    "accelerator": "the accelerator",
    "num_threads": "the number of threads per process",
    "deterministic_algorithms": "torch's deterministic algorithms",
}


def arithmetic_of_this_process() -> dict[str, Any]:
    """Name -> value, as JSON can hold it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    model = "none"
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        model = module.get_device_name() if hasattr(module, "get_device_name") else accelerator.type
    return {
        "torch": str(torch.__version__),
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "accelerator": model,
        "num_threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def differences(before: Mapping[str, Any]) -> list[str]:
    """What is not as it was `before`, in words; what was not recorded then is passed over."""
    now = arithmetic_of_this_process()
    return [
        f"{name} was {before[key]} and is {now[key]}"
        for key, name in _NAMES.items()
        if key in before and before[key] != now[key]
    ]


@contextlib.contextmanager
def set_up(num_threads: int | None, *, deterministic_algorithms: bool) -> Iterator[None]:
    """Inside of the block: so many intra-op threads, and torch's deterministic algorithms if asked for.

    Args:
        num_threads: None: as many as there are.
        deterministic_algorithms: operations that have none raise.
    """
    threads, algorithms = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    try:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        if deterministic_algorithms:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to take part
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(algorithms)
        torch.backends.cudnn.benchmark = benchmark


@lru_cache(maxsize=1)
def cpu_model() -> str:
    """What the CPU calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
