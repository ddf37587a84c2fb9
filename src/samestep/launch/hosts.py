"""What the launchers of several hosts tell each other, through the store of their rendezvous."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from torch.distributed import Store

from samestep.launch.failure import Failure

_PREFIX = "samestep/launch"
_CHECK_EVERY_S = 0.25
_FINISH_PATIENCE_S = 300.0  # as long as torchelastic's agents wait for each other
_EXCHANGE_PATIENCE_S = 2.0


class Hosts:
    """The other launchers of one attempt. On one host every method returns at once.

    Ranks: each launcher has one, over the same store, and calls `exchange` or `finish` at the end.
    """

    def __init__(self, store: Store, host_index: int, num_hosts: int) -> None:
        self._store = store
        self._host_index = host_index
        self._num_hosts = num_hosts
        self._checked_s = 0.0

    def have_failed(self) -> bool:
        """Whether a launcher has said that ranks of its own failed, or the store is gone with its host."""
        if self._num_hosts == 1 or time.monotonic() - self._checked_s < _CHECK_EVERY_S:
            return False
        self._checked_s = time.monotonic()
        try:
            return bool(self._store.check([f"{_PREFIX}/failed"]))
        except RuntimeError:
            return True

    def exchange(self, own: Sequence[Failure], *, is_last: bool) -> list[Failure]:
        """The failures of the other hosts' ranks, as far as they come within two seconds.

        Args:
            own: those of this host's ranks, in order.
            is_last: this launcher ends now, and so shall the others.
        """
        if self._num_hosts == 1:
            return []
        others: list[Failure] = []
        with contextlib.suppress(RuntimeError):
            words = "\n".join(failure.to_json() for failure in own)
            self._store.set(f"{_PREFIX}/failures/{self._host_index}", words)
            if is_last:
                self._store.set(f"{_PREFIX}/failed", "1")
            keys = [f"{_PREFIX}/failures/{i}" for i in range(self._num_hosts) if i != self._host_index]
            if is_last or (own and own[0].lost_a_peer):  # else the cause is here
                _wait_until(lambda: self._store.check(keys), _EXCHANGE_PATIENCE_S)
            for key in keys:
                if self._store.check([key]):
                    others += _failures_in(self._store.get(key))
        return others

    def finish(self) -> None:
        """Return when all hosts' ranks have succeeded, or some have failed."""
        if self._num_hosts == 1:
            return
        with contextlib.suppress(RuntimeError):
            self._store.add(f"{_PREFIX}/finished", 1)
            _wait_until(
                lambda: (
                    self._store.add(f"{_PREFIX}/finished", 0) >= self._num_hosts
                    or self._store.check([f"{_PREFIX}/failed"])
                ),
                _FINISH_PATIENCE_S,
            )
        self._checked_s = 0.0

    def leave(self, *, holds_store: bool) -> None:
        """The launcher that holds the store waits a little for the others, which may still read from it."""
        if self._num_hosts == 1:
            return
        with contextlib.suppress(RuntimeError):
            self._store.add(f"{_PREFIX}/left", 1)
            if holds_store:
                _wait_until(
                    lambda: self._store.add(f"{_PREFIX}/left", 0) >= self._num_hosts, _EXCHANGE_PATIENCE_S
                )


def _failures_in(words: bytes) -> list[Failure]:
    failures = []
    for line in words.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            failures.append(Failure.from_json(line))
    return failures


def _wait_until(condition: Callable[[], bool], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
