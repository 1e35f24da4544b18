"""A signal asks the run to stop; the run decides when.

Imports nothing heavy: train.py installs the handlers before torch is there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import NoReturn

_PAIR_SECONDS = 1.0
_LAUNCHER_SECONDS = 5.0

Handler = Callable[[int, FrameType | None], object] | signal.Handlers

# Signals that ask a run to stop, and what its forked children do with them. A batch system sends
# SIGUSR1 to children, too: it would end processes that the last steps need.
_SIGNALS: Mapping[int, Handler] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGUSR1: signal.SIG_IGN,
}


def handle(number: int, handler: Handler) -> None:
    """Installs a handler for this process alone; a forked child gets the default back.

    With its parent's handler a child would survive `terminate()`, which is how `multiprocessing`
    ends its daemons. Call it in the main thread.
    """
    signal.signal(number, handler)
    _replace_in_children({number: signal.SIG_DFL}, lambda installed: installed == handler)


def _replace_in_children(
    replacements: Mapping[int, Handler], is_ours: Callable[[object], bool]
) -> None:
    """Forked children get `replacements` for the handlers that are this process's own.

    The signals wait until then: one that comes right after the fork would be lost.
    """
    masks = threading.local()  # of each thread that forks

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, replacements)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def replace() -> None:
        for number, handler in replacements.items():
            if is_ours(signal.getsignal(number)):
                signal.signal(number, handler)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=replace)


def leave_on_sigterm() -> None:
    """SIGTERM leaves a command that starts processes, or changes the terminal, through `finally`.

    The exit code is 143. Not for a run, see StopFlag. Call it in the main thread.
    """
    handle(signal.SIGTERM, _leave)


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
        self._ignored = False

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
        for number in _SIGNALS:
            signal.signal(number, self._handle)
        _replace_in_children(_SIGNALS, self._is_ours)

    def ignore(self) -> None:
        """The work is done: a late signal must not make a failure of its end."""
        self._ignored = True
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _is_ours(self, handler: object) -> bool:
        return handler == self._handle or (self._ignored and handler == signal.SIG_IGN)

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
