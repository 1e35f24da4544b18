"""Thread for writes to a run's files: a disk without response delays its callers only once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_SECONDS = 1.0


class _FileThread:
    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # a child has no thread

    def _reset(self) -> None:
        self._changed = threading.Condition()
        # Call -> time.monotonic() at which it is due.
        self._waiting: dict[Callable[[], None], float] = {}
        self._writing: float | None = None  # when the call in progress was due
        self._thread: threading.Thread | None = None

    def call(self, write: Callable[[], None], delay: float | None) -> float:
        with self._changed:
            if self._thread is None or not self._thread.is_alive():  # a bug in `write` ends it
                self._thread = threading.Thread(target=self._serve, name="files", daemon=True)
                self._thread.start()
            now = time.monotonic()
            late = max(0.0, now - self._first_due(now))
            due = now + (delay or 0.0)
            if write not in self._waiting or self._waiting[write] > due:
                self._waiting[write] = due
                self._changed.notify_all()
            if delay is None and threading.current_thread() is not self._thread:
                self._changed.wait_for(self._is_idle, max(0.0, _SECONDS - late))
            return late if late > _SECONDS else 0.0

    def wait(self, seconds: float) -> None:
        with self._changed:
            if self._thread is not None:
                self._waiting = dict.fromkeys(self._waiting, time.monotonic())
                self._changed.notify_all()
                self._changed.wait_for(self._is_idle, seconds)

    def _first_due(self, default: float) -> float:
        """When the first call was or is due that is not done."""
        first = min(self._waiting.values(), default=default)
        return first if self._writing is None else min(first, self._writing)

    def _is_idle(self) -> bool:
        """Whether no call is in progress or due."""
        now = time.monotonic()
        return self._writing is None and all(due > now for due in self._waiting.values())

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._writing = None
                self._changed.notify_all()
                while self._is_idle():
                    first = min(self._waiting.values(), default=None)
                    self._changed.wait(None if first is None else first - time.monotonic())
                write = min(self._waiting, key=self._waiting.__getitem__)
                self._writing = self._waiting.pop(write)
            write()


_thread = _FileThread()


def call_aside(write: Callable[[], None], delay: float | None = None) -> float:
    """Call `write`, which raises nothing, in the thread; return after a second at the latest.

    If it takes longer, later calls return at once, until the thread has caught up. A call that is
    equal to one that waits is dropped: `write` writes all that there is to write.

    Args:
        delay: seconds after which `write` is called, without a wait for it; None: now.

    Returns:
        Seconds for which the thread has been late, if it is more than one; else 0.
    """
    return _thread.call(write, delay)


def wait_for_writes(seconds: float) -> None:
    """Wait until all calls have been made, without their delays, or for this time."""
    _thread.wait(seconds)
