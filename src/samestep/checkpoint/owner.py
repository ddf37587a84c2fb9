"""Who is writing: a process, so that what a dead one left behind can be told from a live one's work."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HIDDEN_PREFIXES", "Owner", "hidden_name", "is_abandoned"]

# Directories on their way in and out of the directory of checkpoints. Hidden, and never taken for one.
SAVING, REMOVING = ".saving-", ".removing-"
HIDDEN_PREFIXES = (SAVING, REMOVING)
_HIDDEN_NAME = re.compile(r"\.(?:saving|removing)-.+~([0-9a-f]{12})-([0-9]+)-([0-9]+)-[0-9a-f]{8}")
_ABANDONED_AFTER_S = 24 * 3600.0  # where the writer cannot be looked up: it ran on another machine


@dataclass(frozen=True)
class Owner:
    """A process, for ever: its number is given out again, but not with the same time of start."""

    place: str  # a digest of host, boot and PID namespace: where the number means this process
    pid: int
    started: int  # in clock ticks since boot; 0 where the system does not say

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        parts = [socket.gethostname(), _read("/proc/sys/kernel/random/boot_id"), _link("/proc/self/ns/pid")]
        place = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
        pid = os.getpid()
        return cls(place, pid, _state_and_start(pid)[1])

    def is_dead(self) -> bool:
        """Whether the process has ended. Ask only where `place` is the own one."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        state, started = _state_and_start(self.pid)
        return state in ("Z", "X") or started != self.started


def hidden_name(prefix: str, name: object) -> str:
    """A name nobody else uses, for a directory of this process that is no checkpoint yet, or any more."""
    owner = Owner.current()
    return f"{prefix}{name}~{owner.place}-{owner.pid}-{owner.started}-{secrets.token_hex(4)}"


def is_abandoned(path: Path) -> bool:
    """Whether `path` is a hidden directory whose process has ended, or, on another machine, must have."""
    match = _HIDDEN_NAME.fullmatch(path.name)
    if match is None or path.is_symlink() or not path.is_dir():
        return False
    owner = Owner(match[1], int(match[2]), int(match[3]))
    if owner.place == Owner.current().place:
        return owner.is_dead()
    newest = max(entry.lstat().st_mtime for entry in (path, *path.iterdir()))
    return time.time() - newest > _ABANDONED_AFTER_S


def _state_and_start(pid: int) -> tuple[str, int]:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], int(fields[19])) if len(fields) > 19 else ("", 0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
