"""What a run is doing, or how it ended, in a word."""

from __future__ import annotations

from hvdtrain.errors import EXIT_NOT_FINITE, EXIT_PREEMPTED

_ENDS = {0: "finished", EXIT_PREEMPTED: "stopped", EXIT_NOT_FINITE: "not finite"}


def run_state(started: bool, end: int | None, owner: bool, launcher: bool) -> str:
    """One of running; restarting (between two starts of `hvdtrain launch`); finished; stopped (it
    was asked to, exit code 75); not finite (3); failed (another code); killed (it has no end, and
    no process shows life); unknown (it has not begun).

    Args:
        started: it has a start event.
        end: the exit code of the end event after the last start; None: there is none.
        owner: the process that owns the run shows life.
        launcher: its `hvdtrain launch` does.
    """
    if end == 0:  # a process that has finished keeps the run for a moment more
        return "finished"
    if end is None and owner:
        return "running"
    if launcher:
        return "restarting"
    if end is not None:
        return _ENDS.get(end, "failed")
    return "killed" if started else "unknown"
