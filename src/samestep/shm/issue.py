"""How a collective is issued: it gets its number and its place among those in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from samestep.errors import CollectiveError
from samestep.shm.allreduce import AllReduce
from samestep.shm.calls import Call
from samestep.shm.engine import Engine
from samestep.shm.exchange import Exchange
from samestep.shm.operation import Operation, Progress
from samestep.shm.works import ShmWork

__all__ = ["Issuer"]


class Issuer:
    """Issues the collectives of one rank of one group.

    Args:
        engine: moves them on.
        exchange: keeps their slots.
        timeout_s: how long each may wait for other ranks.
    """

    def __init__(self, engine: Engine, exchange: Exchange, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._engine = engine
        self._exchange = exchange
        self._sequence = 0
        self._coalescing: list[Operation] | None = None
        self._done = ShmWork(engine, None, None)

    def run_small(self, plan: AllReduce, tensor: torch.Tensor) -> ShmWork | None:
        """Run a small all-reduce here and now; None if other collectives are in flight.

        The same as `launch`, but what it is to keep in order is only written down if there is a wait.
        """
        engine, exchange = self._engine, self._exchange
        engine.lock.acquire()
        try:
            sequence = self._sequence + 1
            if not (engine.is_idle() and exchange.is_slot_free(sequence)):
                return None
            self._sequence = sequence
            stage = plan.show(sequence, tensor)
            if exchange.spin(sequence, 1, engine.num_polls):
                plan.take(sequence, tensor, stage)
                return self._done
            exchange.join(sequence)
            deadline = time.monotonic() + self.timeout_s
            operation = Operation(plan.label.text, sequence, plan.rest(sequence, tensor, stage), deadline)
            engine.run_here(operation)
        except CollectiveError as error:
            engine.break_up(error)
            raise
        finally:
            engine.lock.release()
        if operation.error is not None:
            raise operation.error
        return self._done

    def launch(
        self, call: Call, results: Any, *, in_background: bool, timeout_s: float | None = None
    ) -> ShmWork:
        """Issue one collective, and wait for it unless `in_background`."""

        def make() -> Operation:
            sequence = self._sequence + 1
            progress = call.start(sequence)
            self._sequence = sequence
            self._exchange.join(sequence)
            deadline = time.monotonic() + (timeout_s or self.timeout_s)
            return Operation(call.label.text, sequence, progress, deadline)

        return self._issue(make, results, in_background)

    def launch_all(self, calls: Sequence[Call], results: Any, *, in_background: bool) -> ShmWork:
        """Issue several collectives as one: they run one after the other."""

        def make() -> Operation:
            first = self._sequence + 1
            progresses = [call.start(first + index) for index, call in enumerate(calls)]
            self._sequence += len(calls)
            for index in range(len(calls)):
                self._exchange.join(first + index)
            what = " + ".join(call.label.text for call in calls)
            return Operation(what, first, _chain(progresses), time.monotonic() + self.timeout_s)

        return self._issue(make, results, in_background)

    def converse(self, what: str, start: Callable[[], Progress], results: Any) -> ShmWork:
        """Issue a send or a receive: it has no number, and only its peer need take part."""

        def make() -> Operation:
            return Operation(what, 0, start(), time.monotonic() + self.timeout_s, needs_all=False)

        return self._issue(make, results, in_background=True)

    def start_coalescing(self) -> None:
        """Remember what is issued from now on."""
        self._coalescing = []

    def end_coalescing(self) -> ShmWork:
        """One work for all that was issued since `start_coalescing`."""
        operations, self._coalescing = self._coalescing or [], None
        return self.converse(f"{len(operations)} coalesced", lambda: _until_done(operations), None)

    def _issue(self, make: Callable[[], Operation], results: Any, in_background: bool) -> ShmWork:
        if in_background:
            operation = self._engine.start(make)
            if self._coalescing is not None:
                self._coalescing.append(operation)
            return ShmWork(self._engine, operation, results)
        self._engine.run(make)
        return self._done  # nobody but torch, which waits for it, sees this one


def _until_done(operations: Sequence[Operation]) -> Progress:
    for operation in operations:
        blocked = operation.blocked or (-1, 0)
        while not operation.done:
            yield blocked


def _chain(progresses: Sequence[Progress]) -> Progress:
    for progress in progresses:
        yield from progress
