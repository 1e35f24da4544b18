"""Pace of a start's steps: limit of a host's silence before the host counts as lost."""

from __future__ import annotations

# Minimum time without a step and without a response; longer if steps take longer.
_LEAST_SECONDS = 10.0
_FACTOR = 3.0  # times the longest pause between two steps of this start
# While the pace is unknown: loading, compiling and the first steps take longer.
_START_SECONDS = 60.0
_ENOUGH = 2  # pauses before the pace is known


class Pace:
    """Steps of one start, as its files show them. Pure: the caller passes the time.

    Args:
        now: time of the start, by a monotonic clock.
        step: the most advanced step in the run's files at that time.
    """

    def __init__(self, now: float, step: int) -> None:
        self._step, self._since = step, now
        self._pauses = -1  # the time until the first step does not count
        self._longest = 0.0

    def saw(self, now: float, step: int) -> None:
        """Record the step that the run's files show now."""
        if step == self._step:
            return
        self._pauses += 1
        if self._pauses:
            self._longest = max(self._longest, now - self._since)
        self._step, self._since = step, now

    def patience(self, saving: bool = False) -> float:
        """Return the seconds without a step and without a response before a host counts as lost.

        Args:
            saving: the ranks were asked to stop, and are writing a checkpoint.
        """
        if saving or self._pauses < _ENOUGH:
            return max(_START_SECONDS, _FACTOR * self._longest)
        return max(_LEAST_SECONDS, _FACTOR * self._longest)

    def stalled(self, now: float, saving: bool = False) -> bool:
        """Whether no step was completed for longer than `patience`."""
        return now - self._since > self.patience(saving)
