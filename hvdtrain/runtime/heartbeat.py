"""What a rank tells its watchdog: that it makes progress, and whether it works or waits.

A few bytes of memory shared with the watchdog's process (elastic/watchdog.py), which reads
them without this process's help.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

_LAYOUT = struct.Struct("=QI")
_ADVANCES = struct.Struct("=Q")


class Activity(IntEnum):
    """What a rank does.

    LOADING: from its start until it first takes part: data, model, caches; nobody waits for it.
    PREPARING: something of its own between two waits: files, callbacks, the end of the run.
    WORKING: computes a micro-batch; on its own.
    WAITING: for what has a bound of its own: other ranks in a collective (these have watchdogs,
        Horovod a timeout), or a thread, up to a deadline.
    RENDEZVOUS: for the launcher, which says who takes part.
    ENDING: the run is done; the process ends (process_end.py).
    """

    LOADING = 0
    PREPARING = 1
    WORKING = 2
    WAITING = 3
    RENDEZVOUS = 4
    ENDING = 5


class Heartbeat:
    """Counts beats.

    Args:
        descriptor: of the shared memory; default: a new one.

    Attributes:
        generation_over: this process's generation has failed, and the next one has not begun.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("hvdtrain-heartbeat")
            os.ftruncate(descriptor, _LAYOUT.size + _ADVANCES.size)
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _LAYOUT.size + _ADVANCES.size)
        self._beats = 0
        self._advances = 0
        self._lock = threading.Lock()
        self.generation_over = False

    def beat(self, activity: Activity) -> None:
        """Something was finished; `activity` begins."""
        self._beats += 1
        _LAYOUT.pack_into(self._memory, 0, self._beats, activity)

    def advance(self) -> None:
        """Count a finished chunk of a long activity, such as 1 MiB of a file; from any thread.

        Raises:
            RankLostError: `generation_over`: the other ranks wait for this one to join the next.
        """
        with self._lock:
            self._advances += 1
            _ADVANCES.pack_into(self._memory, _LAYOUT.size, self._advances)
        if self.generation_over:
            # RankLostError of collectives.py, which imports this module. Not at the top: commands
            # that read checkpoints need no Horovod.
            from horovod.common.exceptions import HorovodInternalError

            raise HorovodInternalError("this generation is over")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait that has a bound of its own."""
        _, before = self.read()
        self.beat(Activity.WAITING)
        try:
            yield
        finally:
            self.beat(before)

    def read(self) -> tuple[int, Activity]:
        """(number of beats and advances, what the rank does), from any process."""
        beats, activity = _LAYOUT.unpack_from(self._memory, 0)
        (advances,) = _ADVANCES.unpack_from(self._memory, _LAYOUT.size)
        return beats + advances, Activity(activity)


# This process's own: it has one watchdog, as it has one Horovod. Collectives beat it.
OWN = Heartbeat()
