"""Listing of the runs below a directory, from the ends of files only: fast for long runs, too."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.errors import EXIT_NOT_FINITE, EXIT_PREEMPTED, UserError
from hvdtrain.run_files.events_file import last_lines
from hvdtrain.run_files.owner_token import Token, moved, read
from hvdtrain.run_files.ownership import BEAT_SECONDS
from hvdtrain.untrusted import integer, number, real

# A token that was just written, by this clock and the file server's, needs no second read. If the
# clocks differ, only a second read tells whether its owner is alive: one that is an hour ahead is
# believed, one that is a day ahead is not.
_FRESH_SECONDS, _OLD_SECONDS = 20.0, 86_400.0
_WATCH_SECONDS = 2 * BEAT_SECONDS
_LOOK_SECONDS = 0.1
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
    found: list[tuple[ListedRun, _Ending, Path]] = []
    for directory in directories:
        with suppress(OSError):  # it was just deleted, or belongs to another user
            path = Path(directory)
            listed = _listed(path, {entry.name for entry in os.scandir(path)}, now)
            if listed is not None:
                found.append((*listed, path))
    # An owner that has recorded its end is not asked.
    asked = [path / ".owner" for _, ending, path in found if ending.code is None]
    asked += [path / ".launch.owner" for _, ending, path in found if ending.code != 0]
    living = alive(asked)
    for run, ending, path in found:
        owner, launcher = path / ".owner" in living, path / ".launch.owner" in living
        yield replace(run, state=run_state(ending.started, ending.code, owner, launcher))


class _Ending(NamedTuple):
    """Whether a run has a start event, and the exit code of the end event after the last one."""

    started: bool
    code: int | None


def _listed(run: Path, files: set[str], now: float) -> tuple[ListedRun, _Ending] | None:
    """Summary of a run without its state; None if the directory is not a run directory."""
    if not files & {"config.yaml", "metrics.jsonl", "events.jsonl", ".owner"}:
        return None
    lines = reversed(last_lines(run / "metrics.jsonl"))
    line: dict[str, Any] = next((m for m in lines if integer(m.get("step")) is not None), {})
    events = last_lines(run / "events.jsonl", event="start")[::-1]
    start = next((e for e in events if e.get("event") == "start"), {})
    found = (number(last.get("time")) for last in (line, *events[:1]))
    times = [time for time in found if time is not None]
    ranks = integer(line.get("world_size"))
    listed = ListedRun(
        id=run.name,
        state="unknown",
        step=integer(line.get("step")),
        steps=integer(start.get("total_steps")),
        loss=real(line.get("loss")),
        ranks=integer(start.get("world_size")) if ranks is None else ranks,
        age=max(0.0, now - max(times)) if times else None,
    )
    return listed, _ending(events)


def _ending(events: list[dict[str, Any]]) -> _Ending:
    last = next((e for e in events if e.get("event") in ("start", "end")), {})
    if last.get("event") != "end":
        return _Ending(bool(last), None)
    code = integer(last.get("exit_code"))
    return _Ending(True, 1 if code is None else code)


def alive(paths: Iterable[Path]) -> set[Path]:
    """Return those of the tokens whose owners are alive.

    The clocks of two hosts are not compared: an owner is alive if its heartbeat count changes while
    this process watches, for 4 s at most. A token that was just written needs no second read.
    """
    living: set[Path] = set()
    watched: dict[Path, Token] = {}
    for path in paths:
        token, age = _read(path), _age(path)
        if token is None or token.ended or age > _OLD_SECONDS:
            continue
        if abs(age) < _FRESH_SECONDS:
            living.add(path)
        else:
            watched[path] = token
    deadline = time.monotonic() + _WATCH_SECONDS
    while watched and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        moving = {path for path, token in watched.items() if moved(token, _read(path))}
        living |= moving
        watched = {path: token for path, token in watched.items() if path not in moving}
    return living


def _read(path: Path) -> Token | None:
    try:
        return read(path)
    except OSError:
        return None


def _age(path: Path) -> float:
    """Seconds since the file was written, if its server's clock is this one; infinite: no file."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return math.inf


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
