"""What a rank tells its watchdog: that it gets on, and whether it works or waits.

A few bytes of memory shared with the watchdog's process (elastic/watchdog.py), which reads
them without this process's help.
"""

from __future__ import annotations

import mmap
import os
import struct
from enum import IntEnum

_LAYOUT = struct.Struct("=QI")


class Doing(IntEnum):
    """What a rank does.

    PREPARING: loads, compiles, saves at the end: may take long.
    WORKING: computes a micro-batch; on its own.
    WAITING: for other ranks in a collective; these have watchdogs of their own.
    MEETING: for the launcher, which says who takes part.
    """

    PREPARING = 0
    WORKING = 1
    WAITING = 2
    MEETING = 3


class Heartbeat:
    """Counts beats.

    Args:
        descriptor: of the shared memory; default: a new one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("hvdtrain-heartbeat")
            os.ftruncate(descriptor, _LAYOUT.size)
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _LAYOUT.size)
        self._beats = 0

    def beat(self, doing: Doing) -> None:
        """Something was finished; `doing` begins."""
        self._beats += 1
        _LAYOUT.pack_into(self._memory, 0, self._beats, doing)

    def read(self) -> tuple[int, Doing]:
        """(number of beats, what the rank does), from any process."""
        beats, doing = _LAYOUT.unpack_from(self._memory, 0)
        return beats, Doing(doing)
