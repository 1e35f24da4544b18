"""Decision whether and when a failed run is started again: arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import EXIT_NOT_FINITE, EXIT_PREEMPTED, EXIT_USER

_FIRST_WAIT = 1.0
_LONGEST_WAIT = 60.0
_SAME_STEP = 3

_FINAL = {
    0: "finished",
    EXIT_NOT_FINITE: "the loss stayed not finite: a retry ends the same way",
    EXIT_PREEMPTED: "preempted",
}


@dataclass(frozen=True)
class Verdict:
    """Decision after a start has ended.

    Args:
        wait: seconds until the next start; None: no further start
        reason: why there is no further start
    """

    wait: float | None
    reason: str = ""


class RestartPolicy:
    """Restart policy of one run.

    A start makes progress if it gets further than all previous starts. Progress refills the
    restart budget and resets the backoff.

    Args:
        max_restarts: restarts allowed without progress.
        step: the run's most advanced step so far.
    """

    def __init__(self, max_restarts: int, step: int) -> None:
        self._max_restarts = max_restarts
        self._furthest = step
        self._progressed = False
        self._without_progress = 0
        self._last_step: int | None = None
        self._same_step = 0

    def after(self, code: int, step: int, host_lost: bool) -> Verdict:
        """Decide what to do after a start has ended.

        Args:
            code: its exit code.
            step: the most advanced step in the run's files now.
            host_lost: one of its hosts is lost, so the step is not the cause.
        """
        if step > self._furthest:
            self._furthest, self._progressed, self._without_progress = step, True, 0
        if code in _FINAL:
            return Verdict(None, _FINAL[code])
        # After progress the cause is another one, for example a host that lost its disk.
        if code == EXIT_USER and not self._progressed:
            return Verdict(None, "the command line, the configuration or the input is wrong")
        if host_lost:
            self._last_step, self._same_step = None, 0
        else:
            self._same_step = self._same_step + 1 if step == self._last_step else 1
            self._last_step = step
        if self._same_step >= _SAME_STEP:
            return Verdict(None, f"it failed {_SAME_STEP} times in a row after step {step}")
        if self._without_progress >= self._max_restarts:
            return Verdict(None, f"{self._max_restarts} restarts brought no progress")
        wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0**self._without_progress)
        self._without_progress += 1
        return Verdict(wait)
