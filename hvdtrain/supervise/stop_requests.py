"""Stop signals of a supervisor.

SIGUSR1 or SIGTERM requests an end with a checkpoint; Ctrl-C or a second signal, an end at once.
"""

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
    """The received signals; the handler only records them."""

    def __init__(self) -> None:
        self._signals: list[int] = []

    def install(self) -> None:
        """Install the handlers; call it in the main thread."""
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            handle(number, self._note)

    def __bool__(self) -> bool:
        return bool(self._signals)

    def tick(self) -> None:
        """Wait a moment while a launcher runs.

        Raises:
            Stop: the supervisor must end at once.
        """
        time.sleep(_TICK_SECONDS)
        if signal.SIGINT in self._signals or len(self._signals) > 1:
            raise Stop(128 + self._signals[-1])

    def pause(self, seconds: float) -> None:
        """Wait while no launcher runs.

        Raises:
            Stop: a signal has arrived; there is nothing to save.
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
