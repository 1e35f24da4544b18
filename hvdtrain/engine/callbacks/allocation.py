"""Stop before the scheduler's time limit, with a checkpoint."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from hvdtrain.engine.loop import Callback, Loop, StepRecord
from hvdtrain.log import logger
from hvdtrain.runtime.signals import StopFlag

_ASK_SECONDS = 60.0  # an administrator may change the limit
_FACTOR = 2.0
_LEAST_SECONDS = 30.0


class StopBeforeEnd(Callback):
    """Ask the ranks to stop when there is time for little more than a step and a checkpoint.

    That is twice as much as the slowest step and the next checkpoint need, 30 s at least. One
    rank has this callback.

    Args:
        seconds_left: asks the scheduler, in another thread; None: there is no limit.
        save_seconds: expected duration of the next checkpoint.
        stop: of this rank.
    """

    def __init__(
        self,
        seconds_left: Callable[[], float | None],
        save_seconds: Callable[[], float],
        stop: StopFlag,
    ) -> None:
        self._seconds_left, self._save_seconds, self._stop = seconds_left, save_seconds, stop
        self._end = math.inf  # time.monotonic()
        self._stepped_at: float | None = None
        self._slowest = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._ask, name="allocation", daemon=True).start()

    def _ask(self) -> None:
        while not self._closed.is_set():
            left = self._seconds_left()
            self._end = math.inf if left is None else time.monotonic() + left
            self._closed.wait(_ASK_SECONDS)

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        now = time.monotonic()
        if self._stepped_at is not None:
            self._slowest = max(self._slowest, now - self._stepped_at)
        self._stepped_at = now
        needed = max(_LEAST_SECONDS, _FACTOR * (self._slowest + self._save_seconds()))
        if self._end - now <= needed and not self._stop.raised:
            logger.warning(
                "the scheduler's time limit is %.0f s away: the ranks write a checkpoint and stop",
                self._end - now,
            )
            self._stop.raise_before_signals()

    def close(self) -> None:
        self._closed.set()
