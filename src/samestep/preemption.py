"""Preemption: the scheduler wants its machine back. All ranks stop at the same step, save, and say so.

Ranks get the signal at different moments, or only one of them does; and one that left a step early would
leave the others waiting for its gradients. So every rank brings word of its own signal to the end of each
step, and a small all-reduce, under way during the next step, tells all of them the same.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from samestep import collectives
from samestep.errors import WorldError
from samestep.process_group import default_group

__all__ = ["Preemption"]


class Preemption:
    """While entered, a signal that asks this process to end is remembered, for all ranks to act on together.

        with samestep.World() as world, samestep.Preemption() as preemption:
            for inputs, labels in loader:
                ...  # one step
                if preemption.requested():
                    samestep.checkpoint.save("runs", state, step=step)
                    raise samestep.Preempted

    `Preempted` ends the process with exit status 75, which no other end of a script has: have the scheduler
    start the run anew on it. `samestep run` waits for that, up to `--grace` seconds, and exits with 75 too.

    Ranks: all enter and leave. Only the main thread of a process can receive signals.

    Args:
        process_group: the ranks that stop together. Default: the world.
        signals: what asks the process to end. Slurm's `--signal=USR1@120` sends SIGUSR1 two minutes early.

    Raises:
        WorldError: this is not the main thread.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        signals: Sequence[signal.Signals] = (signal.SIGTERM,),
    ) -> None:
        self._given_group = process_group
        self._signals = tuple(signals)
        self._before: dict[signal.Signals, Any] = {}
        self._group: dist.ProcessGroup | None = None
        self._flag = torch.zeros(1, dtype=torch.int64)
        self._under_way: collectives.Work | None = None
        self._agreed = False
        self.received: signal.Signals | None = None  # by this process, the first one

    def __enter__(self) -> Preemption:
        if threading.current_thread() is not threading.main_thread():
            raise WorldError("Preemption() needs the main thread: Python gives no other one its signals")
        group = self._given_group or default_group()
        if collectives.device_of(group).type != "cpu":
            # A flag on an accelerator would be read after all that the step has queued there.
            group = dist.new_group(dist.get_process_group_ranks(group), backend="gloo")
        self._group = group
        for signum in self._signals:
            self._before[signum] = signal.signal(signum, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        under_way, self._under_way = self._under_way, None
        if under_way is not None and kind is None:
            under_way.wait()

    def requested(self) -> bool:
        """Whether to save and stop now; the same answer on all ranks.

        It is True one step after the first of them got its signal, so that the steps do not wait for it.

        Ranks: all, equally often; once per step is the rule.
        """
        if self._group is None:
            raise WorldError("enter Preemption first: `with samestep.Preemption() as preemption:`")
        if self._agreed:
            return True
        if self._group.size() == 1:
            self._agreed = self.received is not None
        else:
            if self._under_way is not None:
                self._under_way.wait()
                self._agreed = bool(self._flag.item())
            if self._agreed:
                self._under_way = None
            else:
                self._flag.fill_(0 if self.received is None else 1)
                self._under_way = collectives.all_reduce(self._flag, self._group, op=dist.ReduceOp.MAX)
        if self._agreed and self._group.rank() == 0:
            print(  # noqa: T201  # a person who reads the log later wants to know why it ends here
                f"samestep: asked to end; all {self._group.size()} rank(s) stop at this step",
                file=sys.stderr,
                flush=True,
            )
        return self._agreed

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        # More of them change nothing: the launcher and the scheduler may both send one, and SIGKILL is there.
        if self.received is None:
            self.received = signal.Signals(signum)
