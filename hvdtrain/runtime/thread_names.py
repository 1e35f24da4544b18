"""Thread names in the kernel (`comm`), which other processes can read without our help.

A new thread inherits the name of the thread that starts it, so one name marks a library's threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# Horovod's threads: the background thread, and those it starts (Gloo's loops, MPI's progress).
HOROVOD = "horovod"

# https://man7.org/linux/man-pages/man2/PR_SET_NAME.2const.html
_PR_SET_NAME, _PR_GET_NAME = 15, 16
_NAME_BYTES = 16


@contextmanager
def threads_named(name: str) -> Iterator[None]:
    """Context in which threads started by the calling thread get a name.

    Args:
        name: at most 15 bytes.
    """
    prctl = ctypes.CDLL(None).prctl
    before = ctypes.create_string_buffer(_NAME_BYTES)
    prctl(_PR_GET_NAME, before, 0, 0, 0)
    prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_NAME, before, 0, 0, 0)
