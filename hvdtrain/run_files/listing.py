"""Listing of the runs below a directory, from the ends of files only: fast for long runs, too."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import EXIT_NOT_FINITE, EXIT_PREEMPTED, UserError
from hvdtrain.run_files.events_file import last_lines
from hvdtrain.run_files.owner_token import read
from hvdtrain.untrusted import integer, number, real

# An owner writes its token every 2 s; clocks of file servers differ slightly.
_ALIVE_SECONDS = 20.0
_ENDS = {0: "finished", EXIT_PREEMPTED: "stopped", EXIT_NOT_FINITE: "not finite"}


@dataclass(frozen=True)
class ListedRun:
    """Summary of a run.

    Args:
        id: its directory's name
        state: see `run_state`
        step: step of the newest line of metrics.jsonl; None if there is none
        steps: number of steps of the whole run, if its newest start is known
        loss: loss of the newest line
        ranks: world size of the newest line, or else of the newest start
        age: seconds since the newest line of metrics.jsonl or events.jsonl; None if there is none
    """

    id: str
    state: str
    step: int | None
    steps: int | None
    loss: float | None
    ranks: int | None
    age: float | None


def runs_under(root: Path) -> Iterator[ListedRun]:
    """The runs of `run.root`, unordered.

    Raises:
        UserError: it cannot be read.
    """
    now = time.time()
    try:
        with os.scandir(root) as entries:
            directories = [e.path for e in entries if not e.name.startswith(".") and e.is_dir()]
    except OSError as error:
        raise UserError(f"{root}: {error.strerror}; name a directory of runs") from None
    for directory in directories:
        with suppress(OSError):  # it was just deleted, or belongs to another user
            run = _listed(Path(directory), {entry.name for entry in os.scandir(directory)}, now)
            if run is not None:
                yield run


def _listed(run: Path, files: set[str], now: float) -> ListedRun | None:
    """Summary of a run; None if the directory is not a run directory."""
    if not files & {"config.yaml", "metrics.jsonl", "events.jsonl", ".owner"}:
        return None
    lines = reversed(last_lines(run / "metrics.jsonl"))
    line: dict[str, Any] = next((m for m in lines if integer(m.get("step")) is not None), {})
    events = last_lines(run / "events.jsonl", event="start")[::-1]
    start = next((e for e in events if e.get("event") == "start"), {})
    found = (number(last.get("time")) for last in (line, *events[:1]))
    times = [time for time in found if time is not None]
    ranks = integer(line.get("world_size"))
    return ListedRun(
        id=run.name,
        state=_state(run, events),
        step=integer(line.get("step")),
        steps=integer(start.get("total_steps")),
        loss=real(line.get("loss")),
        ranks=integer(start.get("world_size")) if ranks is None else ranks,
        age=max(0.0, now - max(times)) if times else None,
    )


def _state(run: Path, events: list[dict[str, Any]]) -> str:
    last = next((e for e in events if e.get("event") in ("start", "end")), {})
    end = None
    if last.get("event") == "end":
        code = integer(last.get("exit_code"))
        end = 1 if code is None else code
    return run_state(bool(last), end, alive(run / ".owner"), alive(run / ".launch.owner"))


def alive(token: Path) -> bool:
    """Whether the owner that wrote this token is alive."""
    try:
        if abs(time.time() - token.stat().st_mtime) > _ALIVE_SECONDS:
            return False
        owner = read(token)
    except OSError:
        return False
    return owner is not None and not owner.ended


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
