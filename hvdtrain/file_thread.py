"""Thread for writes to a run's files: a disk without response delays a caller only once."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

_SECONDS = 1.0


class _FileThread:
    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # a child has no thread

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._busy = False
        self._late_since: float | None = None

    def call(self, write: Callable[[], None], later: bool) -> float:
        with self._changed:
            if self._thread is None or not self._thread.is_alive():  # a bug in `write` ends it
                self._thread = threading.Thread(target=self._serve, name="files", daemon=True)
                self._thread.start()
            late = 0.0 if self._late_since is None else time.monotonic() - self._late_since
            if later:
                self._catch_up()
            if write not in self._waiting:
                self._waiting.append(write)
            self._changed.notify_all()
            if not later:
                self._catch_up()
            return late

    def _catch_up(self) -> None:
        """Wait for earlier calls, unless they are late already."""
        if self._late_since is None and threading.current_thread() is not self._thread:
            began = time.monotonic()
            if not self._changed.wait_for(self._is_idle, _SECONDS):
                self._late_since = began

    def wait(self, seconds: float) -> None:
        with self._changed:
            if self._thread is not None:
                self._changed.wait_for(self._is_idle, seconds)

    def _is_idle(self) -> bool:
        return not self._busy and not self._waiting

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                if not self._waiting:
                    self._late_since = None
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: bool(self._waiting))
                write, self._busy = self._waiting.popleft(), True
            write()


_thread = _FileThread()


def call_aside(write: Callable[[], None], later: bool = False) -> float:
    """Call `write`, which raises nothing, in the thread; return after a second at the latest.

    If it takes longer, later calls return at once, until the thread has caught up. A call that is
    equal to one that waits is dropped: `write` writes all that there is to write.

    Args:
        later: do not wait for this call, but for earlier ones: for writes in each step.

    Returns:
        Seconds for which the thread has been late; 0 if it is not, or has only just become so.
    """
    return _thread.call(write, later)


def wait_for_writes(seconds: float) -> None:
    """Wait until all calls have been made, or for this time."""
    _thread.wait(seconds)
