"""Progress of a run and last errors of its ranks, read from its files by another process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint import layout
from hvdtrain.errors import UserError
from hvdtrain.run_files.events_file import last_lines
from hvdtrain.run_files.owner_token import LAUNCH, Claim, Token
from hvdtrain.run_files.ownership import NORMAL_PACE, Ownership, TokenPace
from hvdtrain.untrusted import integer, number


@contextlib.contextmanager
def hold(
    run: Path, pace: TokenPace = NORMAL_PACE, known: Token | None = None, since: float = 0.0
) -> Iterator[Ownership]:
    """Context that creates the run directory and keeps other supervisors from this run.

    Args:
        known, since: as for `Ownership.look`.

    Raises:
        UserError: the directory cannot be written, or another supervisor holds it.
    """
    busy = "another hvdtrain launch supervises this run; end it"
    owner = Ownership(run, LAUNCH, busy, pace)
    owner.look(known, since)
    try:
        owner.acquire(Claim.of_this_process())
    except OSError as error:
        raise UserError(
            f"run.root: {run} cannot be written ({error.strerror}); choose another with --run.root"
        ) from None
    try:
        yield owner
    finally:
        owner.release()


def newest_checkpoint(run: Path) -> int:
    """Return the step of the newest finished checkpoint; 0 if there is none."""
    # Not with checkpoint.manager, which imports torch: this process only waits.
    steps = [
        directory.name.removeprefix("step_") for directory in layout.finished(run / "checkpoints")
    ]
    return max((int(step) for step in steps if step.isdecimal()), default=0)


def newest_step(run: Path) -> int:
    """Return the most advanced step in the run's files; 0 if there is none."""
    for line in reversed(list(last_lines(run / "metrics.jsonl"))):
        if (step := integer(line.get("step"))) is not None:
            return max(step, newest_checkpoint(run))
    return newest_checkpoint(run)


def made_steps(run: Path, since: float) -> bool:
    """Whether a step was logged after a unix time."""
    return any(_time(line) >= since for line in last_lines(run / "metrics.jsonl"))


def last_errors(run: Path, since: float, most: int = 5) -> list[str]:
    """Return the last error in each rank's log since a unix time, earliest first.

    Errors of ranks that only lost other ranks come last, after the cause.
    """
    last = []
    for file in sorted(run.glob("logs/rank_*.jsonl")):
        errors = [
            line
            for line in last_lines(file)
            if line.get("level") == "error" and _time(line) >= since
        ]
        last += errors[-1:]
    last.sort(key=lambda e: ("HorovodInternalError" in str(e.get("message")), _time(e)))
    return [f"rank {e.get('rank')} on {e.get('host')}: {e.get('message')}" for e in last[:most]]


def _time(line: dict[str, Any]) -> float:
    return number(line.get("time")) or 0.0
