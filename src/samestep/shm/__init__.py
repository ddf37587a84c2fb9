"""The c10d backend "shm": the ranks of one host through shared memory."""

from __future__ import annotations

from datetime import timedelta

__all__ = ["is_available", "register"]


def is_available() -> bool:
    """Whether this host has what the backend is made of; all ranks of one host find the same.

    Some sandboxes of Linux lack one of the system calls, or hide /proc.
    """
    from samestep.shm.region import can_share
    from samestep.shm.signal import knows_this_processor

    return knows_this_processor() and can_share()


def register() -> None:
    """`torch.distributed` knows the backend "shm" (for CPU tensors). Calling it again changes nothing."""
    import torch.distributed as dist

    from samestep.shm.group import ShmProcessGroup

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> ShmProcessGroup:
        return ShmProcessGroup(store, rank, size, timeout)

    if not hasattr(dist.Backend, "SHM"):
        dist.Backend.register_backend("shm", create, devices=["cpu"])
