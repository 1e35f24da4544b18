"""When a supervisor starts a run again, and when it counts a silent host as lost."""

from __future__ import annotations

from hvdtrain.errors import EXIT_NOT_FINITE, EXIT_PREEMPTED, EXIT_USER

_FIRST_WAIT = 1.0
_LONGEST_WAIT = 60.0
_SAME_STEP = 3

_FINAL = {
    0: "finished",
    EXIT_NOT_FINITE: "the loss remained non-finite: a retry would end in the same way",
    EXIT_PREEMPTED: "preempted",
}


class RestartPolicy:
    """Restart policy of one run.

    A start makes progress if it gets further than all previous starts. Progress refills the
    restart budget and resets the backoff.

    Args:
        max_restarts: restarts allowed without progress.
        step: the run's most advanced step so far.
        steps_known: False for a script whose steps and exit codes are its own: only 0 is final, and
            2 at the first start; there is no progress.
    """

    def __init__(self, max_restarts: int, step: int, steps_known: bool = True) -> None:
        self._max_restarts, self._steps_known = max_restarts, steps_known
        self._furthest = step
        self._progressed = False
        self._without_progress = 0
        self._last_step: int | None = None
        self._same_step = 0

    def after(self, code: int, step: int, host_lost: bool) -> float | str:
        """Return the seconds until the next start after one has ended, or why there is none.

        Args:
            code: its exit code.
            step: the most advanced step in the run's files now.
            host_lost: one of its hosts is lost, so the step is not the cause.
        """
        if step > self._furthest:
            self._furthest, self._progressed, self._without_progress = step, True, 0
        if not self._steps_known:
            if code == EXIT_USER and not self._without_progress:
                return "exit code 2 means a wrong command line"
            return _FINAL[0] if code == 0 else self._next_restart("failed")
        if code in _FINAL:
            return _FINAL[code]
        # After progress the cause is another one, for example a host that lost its disk.
        if code == EXIT_USER and not self._progressed:
            return "the command line, the configuration or the input is wrong"
        if host_lost:
            self._last_step, self._same_step = None, 0
        else:
            self._same_step = self._same_step + 1 if step == self._last_step else 1
            self._last_step = step
        if self._same_step >= _SAME_STEP:
            return f"it failed {_SAME_STEP} times in a row after step {step}"
        return self._next_restart("brought no progress")

    def _next_restart(self, failed: str) -> float | str:
        if self._without_progress >= self._max_restarts:
            return f"{self._max_restarts} restarts {failed}"
        wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0**self._without_progress)
        self._without_progress += 1
        return wait


# Pace of a start's steps: limit of a host's silence before the host counts as lost.


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

    def stall_seconds(self, saving: bool = False) -> float:
        """Return the seconds without a step and without a response before a host counts as lost.

        Args:
            saving: the ranks were asked to stop, and are writing a checkpoint.
        """
        if saving or self._pauses < _ENOUGH:
            return max(_START_SECONDS, _FACTOR * self._longest)
        return max(_LEAST_SECONDS, _FACTOR * self._longest)

    def stalled(self, now: float, saving: bool = False) -> bool:
        """Whether no step was completed for longer than `stall_seconds`."""
        return now - self._since > self.stall_seconds(saving)
