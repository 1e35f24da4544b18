"""Signals that ask the run to stop; the run decides when.

Imports nothing heavy: train.py installs the handlers before it imports torch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hvdtrain.runtime.allocation import borrowed_since
from hvdtrain.runtime.heartbeat import HEARTBEAT

# Batch systems, mpirun and `timeout` send pairs: a signal so soon after the first belongs to it.
PAIR_SECONDS = 1.0
_LAUNCHER_SECONDS = 10.0

Handler = Callable[[int, FrameType | None], object] | signal.Handlers

# By which batch systems, users and terminals ask all processes of a job at once to end. A rank's
# own processes survive them: it needs them for its last step, and ends them itself.
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# Signals that ask a run to stop, and their handlers in forked children. A batch system also sends
# SIGUSR1 to children: it would end processes that the last steps need.
_SIGNALS: Mapping[int, Handler] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGUSR1: signal.SIG_IGN,
    signal.SIGUSR2: signal.SIG_IGN,
    signal.SIGHUP: signal.SIG_IGN,
}


def requests() -> list[signal.Signals]:
    """Return the signals of `ASKING` that a launcher handles: not SIGHUP under nohup."""
    hup = signal.getsignal(signal.SIGHUP)
    return [one for one in ASKING if one != signal.SIGHUP or hup != signal.SIG_IGN]


def handle(number: int, handler: Handler) -> None:
    """Install a handler for this process only; forked children get the default handler.

    With its parent's handler a child would survive `terminate()`, with which `multiprocessing`
    ends its daemons. Call it in the main thread.
    """
    signal.signal(number, handler)
    _replace_in_children({number: signal.SIG_DFL}, lambda installed: installed == handler)


def _is_in_use(number: int) -> bool:
    return is_caught(number) or signal.getsignal(number) != signal.SIG_DFL


def is_caught(number: int, process: int | str = "self") -> bool:
    """Whether a process handles a signal, also with a handler that Python does not know.

    Raises:
        OSError: the process is gone.
    """
    caught = Path(f"/proc/{process}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (number - 1) & 1)


def restore_default(number: int) -> None:
    """Remove the handler of a signal; no effect in a thread, where Python has no access to it."""
    if _in_main_thread():
        signal.signal(number, signal.SIG_DFL)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def blocked() -> Iterator[None]:
    """Block the signals of `ASKING` in this thread; a process started meanwhile inherits that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def survive() -> None:
    """Make this process survive the signals of `ASKING`, and unblock them.

    They are handled, not ignored: programs that this process starts can still be ended by them.
    """
    for number in ASKING:
        handle(number, _survived)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


def _survived(number: int, frame: FrameType | None) -> None:
    return


def _replace_in_children(
    replacements: Mapping[int, Handler], is_ours: Callable[[object], bool]
) -> None:
    """Install `replacements` in forked children for handlers that are this process's own.

    The signals are blocked until then: a signal right after the fork would be lost.
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
    """Make SIGTERM end a command by SystemExit, so that its `finally` blocks run.

    For commands that start processes or change the terminal; a run uses StopFlag. The exit code is
    143. Call it in the main thread.
    """
    handle(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


class StopFlag:
    """Flag raised by SIGTERM, SIGUSR1, SIGUSR2 or SIGHUP. The handler does nothing else.

    A later signal ends the process at once, with exit code 128 + its number. A signal within
    PAIR_SECONDS does not count as a later one.

    Attributes:
        raised_at: time.monotonic() of the first signal, or None.
    """

    def __init__(self) -> None:
        self.raised_at: float | None = None
        self._counted_from: float | None = None  # time from which signals count as later ones
        self._ignored = False
        self._before: dict[int, Any] = {}  # handlers that `install` has replaced

    @property
    def installed(self) -> bool:
        """Whether signals raise the flag: it was installed, in the main thread."""
        return bool(self._before)

    @property
    def raised(self) -> bool:
        return self.raised_at is not None

    def raised_by_launcher(self) -> bool:
        """Wait up to 10 s for a launcher's signal; return whether the flag is raised.

        A launcher ends all ranks when the first of them ends. If all ranks find the same error,
        the first one reports it, and the others print nothing.
        """
        deadline = time.monotonic() + _LAUNCHER_SECONDS
        while not self.raised and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.raised

    def install(self) -> None:
        """Install the handlers; in a thread no signal raises the flag.

        SIGUSR2 and SIGHUP keep what a script, or nohup, has set for them. On a lent host no signal
        raises it either: the batch system sends them to all processes of its job, and the agent
        decides that only this host leaves.
        """
        if not _in_main_thread():
            return
        if borrowed_since() is not None:
            survive()
        else:
            kept = [number for number in (signal.SIGUSR2, signal.SIGHUP) if _is_in_use(number)]
            self._before = {
                number: signal.signal(number, self._handle)
                for number in _SIGNALS
                if number not in kept
            }
            _replace_in_children(_SIGNALS, self._is_ours)

    def ignore(self) -> None:
        """Ignore signals after the work is done: a late signal must not make the end a failure."""
        self._ignored = True
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def uninstall(self) -> None:
        """Restore the handlers from before `install`, for a process that continues."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _is_ours(self, handler: object) -> bool:
        return handler == self._handle or (self._ignored and handler == signal.SIG_IGN)

    def raise_(self) -> None:
        """Raise the flag as a signal does; a second call changes nothing."""
        self.raise_before_signals()
        self._counted_from = self._counted_from or self.raised_at

    def raise_before_signals(self, at: float | None = None) -> None:
        """Raise the flag; the host's own SIGTERM, which follows, still counts as the first one.

        Args:
            at: time.monotonic() from which the time to the end counts; default: now.
        """
        self.raised_at = self.raised_at or at or time.monotonic()
        HEARTBEAT.stopping = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._counted_from is not None and now - self._counted_from > PAIR_SECONDS:
            os._exit(128 + number)
        self._counted_from = self._counted_from or now
        self.raise_()
