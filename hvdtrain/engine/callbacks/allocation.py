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
_LOOK_SECONDS = 1.0
_LONGEST_LOOK_SECONDS = 60.0  # a longer one means that the job was suspended
_FACTOR = 2.0
_LEAST_SECONDS = 30.0


class StopBeforeEnd(Callback):
    """Ask the ranks to stop when there is time for little more than a step and a checkpoint.

    That is twice as much as the slowest step and the next checkpoint need, 30 s at least. One
    rank has this callback. Its clock stands still while the job is suspended, as the scheduler's
    does.

    Args:
        seconds_left: asks the scheduler, in another thread: infinity without a limit; None: no
            answer.
        save_seconds: expected duration of the next checkpoint.
        grace_seconds: as preempt.grace_seconds.
        stop: of this rank.
    """

    def __init__(
        self,
        seconds_left: Callable[[], float | None],
        save_seconds: Callable[[], float],
        grace_seconds: float,
        stop: StopFlag,
    ) -> None:
        self._seconds_left, self._save_seconds, self._stop = seconds_left, save_seconds, stop
        self._grace = grace_seconds
        self._now, self._end = 0.0, math.inf
        self._stepped_at: float | None = None
        self._slowest = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="allocation", daemon=True).start()

    def _watch(self) -> None:
        due = seen = time.monotonic()
        while not self._closed.is_set():
            asks = seen >= due
            left = self._seconds_left() if asks else None
            before, seen = seen, time.monotonic()
            self._now += min(seen - before, _LONGEST_LOOK_SECONDS)
            if left is not None:
                self._end = self._now + left
            if asks:
                due = seen + _ASK_SECONDS
            self._closed.wait(_LOOK_SECONDS)

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        now = self._now
        if self._stepped_at is not None:
            self._slowest = max(self._slowest, now - self._stepped_at + _LOOK_SECONDS)
        self._stepped_at = now
        needed = max(_LEAST_SECONDS, _FACTOR * (self._slowest + self._save_seconds()))
        left = self._end - now
        if left <= needed and not self._stop.raised:
            logger.warning(
                "the scheduler's time limit is %.0f s away: the ranks write a checkpoint and stop",
                left,
            )
            self._stop.raise_before_signals(time.monotonic() + max(0.0, left - self._grace))

    def close(self) -> None:
        self._closed.set()
