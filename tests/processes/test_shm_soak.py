"""The short form of benchmarks/soak.py."""

from __future__ import annotations

import pytest
from benchmarks import soak

from samestep.shm import register
from samestep.testing import process_ranks


def mixed(num_collectives, seed):
    register()
    soak.mixed(num_collectives, seed)


@pytest.mark.parametrize(("size", "num_collectives"), [(2, 250), (3, 120)])
def test_mixed_collectives_equal_gloo(size, num_collectives):
    process_ranks(mixed, size, num_collectives, 20_261_201 + size, timeout=110.0)


def test_killed_ranks_leave_nothing_behind():
    soak.kill_cycles(3, seed=1)
