"""State of a run in one word."""

from __future__ import annotations

from hvdtrain.errors import EXIT_NOT_FINITE, EXIT_PREEMPTED

_ENDS = {0: "finished", EXIT_PREEMPTED: "stopped", EXIT_NOT_FINITE: "not finite"}


def run_state(started: bool, end: int | None, owner: bool, launcher: bool) -> str:
    """One of running; restarting (between two starts of `hvdtrain launch`); finished; stopped (on
    request, exit code 75); not finite (3); failed (another code); killed (no end event, and no live
    process); unknown (not started).

    Args:
        started: it has a start event.
        end: the exit code of the end event after the last start; None if there is none.
        owner: the process that owns the run is alive.
        launcher: its `hvdtrain launch` is alive.
    """
    if end == 0:  # a finished process owns the run for a moment longer
        return "finished"
    if end is None and owner:
        return "running"
    if launcher:
        return "restarting"
    if end is not None:
        return _ENDS.get(end, "failed")
    return "killed" if started else "unknown"
