"""Runs tests of the suite with samestep's classes or with torch's, and says which of them count."""

from __future__ import annotations

import gc
import re
from dataclasses import replace

import samestep
from tests.conformance.ddp_suite.applicability import NEEDS_GPU, NOT_FOR_SAMESTEP
from tests.conformance.ddp_suite.ranks import Outcome, run_test
from tests.conformance.ddp_suite.shim import (
    TORCH_DDP,
    TORCH_SYNC_BATCHNORM,
    forget_device_ids,
    import_suite,
)

IMPLEMENTATIONS = ("torch", "samestep")
# On an idle machine a test takes 0.3 s, torch.compile 4 s, and the one that trains 252 models 40 s.
_TIMEOUT_S = 60.0
_SLOW_S = {"test_ddp_compile_static_graph": 240.0, "test_ddp_uneven_inputs": 240.0}
_NOISE = re.compile(r"\x1b\[[0-9;]*m|^\w+: \[[^\]]*\.cc:\d+\] |0x[0-9a-f]+|/tmp/\S+|127\.0\.0\.1\S*")


class Bench:
    """The suite in this process, ready to run its tests on forked ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._suite = import_suite(world_size)
        self._classes = {
            "torch": (TORCH_DDP, TORCH_SYNC_BATCHNORM),
            "samestep": (
                samestep.DistributedDataParallel,
                getattr(samestep, "SyncBatchNorm", TORCH_SYNC_BATCHNORM),
            ),
        }
        for ddp, _ in self._classes.values():
            forget_device_ids(ddp)
        gc.collect()
        gc.freeze()  # or each collection in a forked rank copies all that was imported

    def run(self, name: str, implementation: str) -> Outcome:
        """What becomes of the test `name` with the classes of `implementation`."""
        if name in NEEDS_GPU:
            return Outcome("skip", NEEDS_GPU[name])
        timeout_s = _SLOW_S.get(name, _TIMEOUT_S)
        outcome = run_test(self._suite, name, self.world_size, self._classes[implementation], timeout_s)
        reason = NOT_FOR_SAMESTEP.get(name)
        if implementation == "samestep" and reason and outcome.status in ("fail", "hang"):
            return replace(outcome, status="skip", detail=reason)
        return replace(outcome, detail=_NOISE.sub("", outcome.detail))
