"""A process that loads micro-batches for its rank."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html


def begin_worker(number: int) -> None:
    """Make the worker exit with its rank, however the rank exits, and ignore the rank's signals.

    Otherwise it would hold the lock on the run directory and the exporter's port for seconds.
    """
    rank = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank:
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for ignored in (signal.SIGUSR1, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)
