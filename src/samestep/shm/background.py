"""The group's own thread: makes progress when nobody else has for a while, or at once when futures wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Background"]

_MAX_CALLBACKS = 64  # that can wait for something at the same time


class Background:
    """A thread that calls `progress` when it is called for, started when it first is.

    Whoever issues or waits moves collectives on as well, and cheaper: so the thread lets `grace_s` pass since
    the last time somebody did. Where that is a future, which nobody here sees being waited for, it hurries.

    Args:
        progress: moves everything on until nothing is left or others wait themselves; whether to call it
            again.
        grace_s: how long nobody may have made progress before the thread does.
    """

    def __init__(self, progress: Callable[[], bool], grace_s: float) -> None:
        self._progress = progress
        self._grace_s = grace_s
        self._thread: threading.Thread | None = None
        self._callbacks: ThreadPoolExecutor | None = None
        self._called = threading.Event()
        self._hurried = threading.Event()
        self._last_touch = 0.0
        self._closed = False

    @property
    def is_started(self) -> bool:
        """Whether the thread has ever been called for."""
        return self._thread is not None

    def touch(self) -> None:
        """Somebody has just made progress."""
        self._last_touch = time.monotonic()

    def call(self) -> None:
        """Something is in flight."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="samestep-shm", daemon=True)
            self._thread.start()
        if not self._called.is_set():
            self._called.set()

    def hurry(self) -> None:
        """Something is in flight, and nobody else may make progress."""
        self._hurried.set()
        self.call()

    def calm(self) -> None:
        """Nothing is in flight any more."""
        self._hurried.clear()

    def submit(self, callback: Callable[[], None]) -> None:
        """Call `callback` in another thread than the one that makes progress."""
        if self._callbacks is None:
            self._callbacks = ThreadPoolExecutor(_MAX_CALLBACKS, thread_name_prefix="samestep-shm-done")
        self._callbacks.submit(callback)

    def stop(self) -> None:
        """The thread ends as soon as it looks up."""
        self._closed = True
        self._hurried.set()
        self._called.set()

    def join(self) -> None:
        """Return when the thread has ended, after `stop`."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._callbacks is not None:
            self._callbacks.shutdown(wait=False)

    def _main(self) -> None:
        while True:
            self._called.wait()
            self._wait_for_silence()
            if self._closed:
                return
            self._called.clear()
            if self._progress():
                self._called.set()

    def _wait_for_silence(self) -> None:
        while not self._hurried.is_set():
            silent_s = time.monotonic() - self._last_touch
            if silent_s >= self._grace_s:
                return
            self._hurried.wait(self._grace_s - silent_s)
