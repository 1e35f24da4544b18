"""Clock that stands still while its process is suspended."""

from __future__ import annotations

import time


class Clock:
    """Clock of the time in which this process ran: it advances at each look.

    Args:
        longest: seconds between two looks; a longer interval means that the process, or its whole
            job, was suspended.

    Attributes:
        now: seconds since its start.
    """

    def __init__(self, longest: float) -> None:
        self.now, self._longest = 0.0, longest
        self._seen = time.monotonic()

    def look(self) -> float:
        """Advance the clock; return by how many seconds."""
        seen = time.monotonic()
        passed = min(seen - self._seen, self._longest)
        self.now, self._seen = self.now + passed, seen
        return passed
