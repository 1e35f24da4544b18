"""Report of a rank to its watchdog: its progress, and whether it works or waits.

A few bytes of memory are shared with the watchdog's process (elastic/watchdog.py), which reads
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
_OVER = struct.Struct("=?")
_OVER_AT = _LAYOUT.size + _ADVANCES.size
_STOPPING_AT = _OVER_AT + _OVER.size
_STUCK = struct.Struct("=f")
_STUCK_AT = _STOPPING_AT + _OVER.size
_SIZE = _STUCK_AT + _STUCK.size


class Activity(IntEnum):
    """Current activity of a rank.

    LOADING: from its start until it first takes part: data, model, caches; no rank waits for it.
    PREPARING: local work between two waits: files, callbacks, the end of the run.
    WORKING: computes a micro-batch; local work.
    WAITING: waits with a separate limit: for other ranks in a collective (they have watchdogs, and
        Horovod has a timeout), or for a thread, up to a deadline.
    RENDEZVOUS: waits for its ranks from the launcher.
    ENDING: the run is done; the process ends (train.py).
    DONE: the run is done; the script works on without limits.
    LEAVING: WAITING in a generation that has failed: the wait ends soon, or never, such as a call
        of NCCL that cannot be aborted.
    """

    LOADING = 0
    PREPARING = 1
    WORKING = 2
    WAITING = 3
    RENDEZVOUS = 4
    ENDING = 5
    LEAVING = 6
    DONE = 7


class Heartbeat:
    """Counter of progress in shared memory.

    Args:
        descriptor: descriptor of the shared memory; default: a new one.

    Attributes:
        judged: a watchdog ends this process if it makes no progress.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("hvdtrain-heartbeat")
            os.ftruncate(descriptor, _SIZE)
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _SIZE)
        self._beats = 0
        self._advances = 0
        self._lock = threading.Lock()
        self.judged = False

    @property
    def generation_over(self) -> bool:
        """Whether this process's generation has failed, and the next one has not begun."""
        over: bool = _OVER.unpack_from(self._memory, _OVER_AT)[0]
        return over

    @generation_over.setter
    def generation_over(self, over: bool) -> None:
        _OVER.pack_into(self._memory, _OVER_AT, over)

    @property
    def stopping(self) -> bool:
        """Whether this process was asked to stop."""
        stopping: bool = _OVER.unpack_from(self._memory, _STOPPING_AT)[0]
        return stopping

    @stopping.setter
    def stopping(self, stopping: bool) -> None:
        _OVER.pack_into(self._memory, _STOPPING_AT, stopping)

    @property
    def stuck_seconds(self) -> float:
        """Seconds for which this process has been stuck, as its watchdog sees it; 0: it is not."""
        seconds: float = _STUCK.unpack_from(self._memory, _STUCK_AT)[0]
        return seconds

    @stuck_seconds.setter
    def stuck_seconds(self, seconds: float) -> None:
        _STUCK.pack_into(self._memory, _STUCK_AT, seconds)

    def beat(self, activity: Activity) -> None:
        """Record progress; `activity` begins."""
        self._beats += 1
        _LAYOUT.pack_into(self._memory, 0, self._beats, activity)

    def advance(self) -> None:
        """Count a finished chunk of a long activity, such as 1 MiB of a file; from any thread.

        Raises:
            RankLostError: `generation_over`: the other ranks wait for this one to rejoin.
        """
        with self._lock:
            self._advances += 1
            _ADVANCES.pack_into(self._memory, _LAYOUT.size, self._advances)
        if self.generation_over:
            # This is RankLostError of collectives.py, which imports this module. Imported here
            # because commands that read checkpoints need no Horovod.
            from hvdtrain.runtime.horovod import HorovodInternalError

            raise HorovodInternalError("this generation is over")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context for a wait that has a limit of its own."""
        before = Activity(_LAYOUT.unpack_from(self._memory, 0)[1])
        self.beat(Activity.WAITING)
        try:
            yield
        finally:
            self.beat(before)

    def read(self) -> tuple[int, Activity]:
        """Return (number of beats and advances, activity); in any process."""
        beats, activity = _LAYOUT.unpack_from(self._memory, 0)
        (advances,) = _ADVANCES.unpack_from(self._memory, _LAYOUT.size)
        if activity == Activity.WAITING and self.generation_over:
            activity = Activity.LEAVING
        return beats + advances, Activity(activity)


# The heartbeat of this process, which has one watchdog and one Horovod. Collectives beat it.
HEARTBEAT = Heartbeat()
