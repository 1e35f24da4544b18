"""A signal asks the run to stop; the run decides when.

Imports nothing heavy: train.py installs the handlers before torch is there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

_PAIR_SECONDS = 1.0
_LAUNCHER_SECONDS = 5.0


def leave_on_sigterm() -> None:
    """SIGTERM leaves a command that starts processes, or changes the terminal, through `finally`.

    The exit code is 143. Not for a run, see StopFlag. Call it in the main thread.
    """
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


class StopFlag:
    """Raised by SIGUSR1 or SIGTERM. The handler does nothing else.

    A later signal ends the process at once, with exit code 128 + its number; not one that comes
    within a second: Slurm and mpirun send theirs in pairs.

    Attributes:
        raised_at: time.monotonic() of the first signal, or None.
    """

    def __init__(self) -> None:
        self.raised_at: float | None = None
        self._counted_from: float | None = None  # from now on a signal is a later one

    @property
    def raised(self) -> bool:
        return self.raised_at is not None

    def raised_by_launcher(self) -> bool:
        """Waits a few seconds for it: a launcher ends all ranks when the first of them ends.

        Where all find the same mistake, the first of them tells it and these keep quiet.
        """
        deadline = time.monotonic() + _LAUNCHER_SECONDS
        while not self.raised and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.raised

    def install(self) -> None:
        """Takes over the two signals; call it in the main thread."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._handle)

    def ignore(self) -> None:
        """The work is done: a late signal must not make a failure of its end."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def raise_(self) -> None:
        """As if a signal had come; a second time changes nothing."""
        self.raise_before_signals()
        self._counted_from = self._counted_from or self.raised_at

    def raise_before_signals(self) -> None:
        """The same, where the host's own SIGTERM will follow, which is not yet a second one."""
        self.raised_at = self.raised_at or time.monotonic()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._counted_from is not None and now - self._counted_from > _PAIR_SECONDS:
            os._exit(128 + number)
        self._counted_from = self._counted_from or now
        self.raise_()
