"""The handle of a collective: what `async_op=True` returns."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from samestep.shm.engine import Engine
from samestep.shm.lanes import Receipt
from samestep.shm.operation import Operation

__all__ = ["ShmWork"]


class ShmWork(dist._Work):
    """A collective in flight, or done.

    Args:
        engine: moves it on.
        operation: the collective; None if it was done at once.
        results: what the future holds: the output tensors.
    """

    def __init__(self, engine: Engine, operation: Operation | None, results: Any) -> None:
        super().__init__()
        self._engine = engine
        self._operation = operation
        self._results = results
        self._future: Any = None
        self.receipt: Receipt | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is done.

        Raises:
            CollectiveError: it failed, or `timeout` passed.
        """
        if self._operation is not None:
            # torch says "no time-out" by zero, or by a negative one.
            limit = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
            self._engine.wait(self._operation, limit)
        return True

    def is_completed(self) -> bool:
        """Whether it is done, or has failed; never waits."""
        operation = self._operation
        if operation is not None and not operation.done:
            self._engine.poll()
        return operation is None or operation.done

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Why it failed; None if it has not."""
        return None if self._operation is None else self._operation.error

    def result(self) -> Any:
        """The output tensors."""
        return self._results

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def source_rank(self) -> int:
        """Who sent what was received."""
        source = None if self.receipt is None else self.receipt.source
        return -1 if source is None else source

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """A future of the output tensors; it is completed without anybody waiting for the work."""
        if self._future is None:
            self._future = torch.futures.Future()
            operation = self._operation
            if operation is None:
                self._future.set_result(self._results)
            else:
                self._engine.when_done(operation, self._complete_future)
        return self._future

    def _complete_future(self) -> None:
        error = self.exception()
        if error is None:
            self._future.set_result(self._results)
        else:
            self._future.set_exception(error)
