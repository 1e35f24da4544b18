"""The pace of a start's steps: how long a host may be silent before its silence is believed."""

from __future__ import annotations

# At least this long without a step and without an answer; longer if steps take longer.
_LEAST_SECONDS = 10.0
_FACTOR = 3.0  # times the longest pause between two steps of this start
# As long as the pace is not known: loading, compiling and the first steps take their time.
_START_SECONDS = 60.0
_ENOUGH = 2  # pauses before the pace is known


class Pace:
    """Steps of one start, as its files show them. Pure: the caller passes the time.

    Args:
        now: when the start began, by a clock that never goes back.
        step: the most advanced step that the run's files showed then.
    """

    def __init__(self, now: float, step: int) -> None:
        self._step, self._since = step, now
        self._pauses = -1  # the time until the first step is none
        self._longest = 0.0

    def saw(self, now: float, step: int) -> None:
        """The run's files show this step now."""
        if step == self._step:
            return
        self._pauses += 1
        if self._pauses:
            self._longest = max(self._longest, now - self._since)
        self._step, self._since = step, now

    def patience(self, saving: bool = False) -> float:
        """Seconds without a step and without an answer after which a host counts as lost.

        Args:
            saving: the ranks were asked to stop, and write a checkpoint.
        """
        if saving or self._pauses < _ENOUGH:
            return max(_START_SECONDS, _FACTOR * self._longest)
        return max(_LEAST_SECONDS, _FACTOR * self._longest)

    def stalled(self, now: float, saving: bool = False) -> bool:
        """Whether no step was completed for longer than that."""
        return now - self._since > self.patience(saving)
