"""Signals to a supervisor: SIGUSR1 or SIGTERM asks for a good end, Ctrl-C or a second for any."""

from __future__ import annotations

import signal
import time
from types import FrameType

from hvdtrain.errors import EXIT_PREEMPTED
from hvdtrain.runtime.signals import handle

_TICK_SECONDS = 0.1


class Stop(Exception):
    """The supervisor ends now, with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class StopRequests:
    """The signals that came; a handler only notes them."""

    def __init__(self) -> None:
        self._signals: list[int] = []

    def install(self) -> None:
        """Takes over the signals; call it in the main thread."""
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            handle(number, self._note)

    def __bool__(self) -> bool:
        return bool(self._signals)

    def tick(self) -> None:
        """Waits a moment beside something that runs.

        Raises:
            Stop: nothing is waited for any longer.
        """
        time.sleep(_TICK_SECONDS)
        if signal.SIGINT in self._signals or len(self._signals) > 1:
            raise Stop(128 + self._signals[-1])

    def pause(self, seconds: float) -> None:
        """Waits while nothing runs.

        Raises:
            Stop: any signal came; there is nothing to save.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.tick()
            if self._signals:
                raise Stop(EXIT_PREEMPTED)
            if time.monotonic() >= deadline:
                return

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
