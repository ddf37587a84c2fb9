"""Evidence that the kernel killed a process because memory ran out."""

from __future__ import annotations

import re
from pathlib import Path

_VMSTAT = Path("/proc/vmstat")
_CGROUPS = Path("/sys/fs/cgroup")


class OutOfMemoryCounter:
    """How many processes the kernel has killed for memory since this object was made (Linux)."""

    def __init__(self) -> None:
        self._files = _counter_files()
        self._before = self._read()

    def evidence(self) -> str:
        """A few words for the report; "" if the counters say that no process was killed for memory."""
        if not self._before:
            return "this system keeps no count"
        after = self._read()
        grown = [path for path, count in self._before.items() if after.get(path, count) > count]
        return f"oom_kill in {grown[0]} grew" if grown else ""

    def _read(self) -> dict[Path, int]:
        counts = {}
        for path in self._files:
            try:
                count = parse_count(path.read_text())
            except OSError:
                continue
            if count is not None:
                counts[path] = count
        return counts


def parse_count(text: str) -> int | None:
    """The number after `oom_kill` in memory.events, memory.oom_control or vmstat; None if there is none."""
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else None


def _counter_files() -> list[Path]:
    """Of this process's own control group, and of the whole machine."""
    files = []
    try:
        memberships = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        memberships = []
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        inside = path.lstrip("/")
        if controllers == "":
            files += [_CGROUPS / inside / "memory.events", _CGROUPS / "memory.events"]
        elif "memory" in controllers.split(","):
            files += [
                _CGROUPS / "memory" / inside / "memory.oom_control",
                _CGROUPS / "memory" / "memory.oom_control",
            ]
    return [*files, _VMSTAT]
