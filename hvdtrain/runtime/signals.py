"""A signal asks the run to stop; the run decides when."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType


class StopFlag:
    """Raised by SIGUSR1 or SIGTERM. The handler does nothing else.

    A second signal ends the process at once, with exit code 128 + its number.
    """

    def __init__(self) -> None:
        self.raised = False
        self.raised_at: float | None = None  # time.monotonic()

    def install(self) -> None:
        """Takes over the two signals; call it in the main thread."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.raised:
            os._exit(128 + number)
        self.raised_at = time.monotonic()
        self.raised = True
