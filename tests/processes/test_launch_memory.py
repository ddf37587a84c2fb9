"""The kernel kills a rank for memory: where this process may set a limit of its own, really."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import launch, script

CGROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def limited() -> Iterator[Path]:
    """A control group of 300 MB; skipped where making one is not allowed."""
    is_v1 = (CGROUPS / "memory").is_dir()
    group = CGROUPS / ("memory" if is_v1 else "") / f"samestep-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text("300M")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group of our own: {error.strerror}")
    yield group
    with contextlib.suppress(OSError):
        group.rmdir()


def test_killed_for_memory(tmp_path: Path, limited: Path) -> None:
    script(
        tmp_path,
        """
        if rank == 1:
            held = []
            while True:
                held.append(bytearray(10_000_000))
        time.sleep(600)
        """,
    )
    with launch(
        tmp_path, "run", "--nproc", "2", "script.py", main="launcher:main_in_cgroup", TEST_CGROUP=str(limited)
    ) as launched:
        assert launched.wait() == 137
    line = next(line for line in launched.stderr.splitlines() if line.startswith("rank 1 of 2 failed"))
    assert "killed by the kernel, probably out of memory (oom_kill in" in line
