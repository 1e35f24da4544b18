"""The Slurm job that holds a run, the jobs that lend it hosts, and the time that they have left."""

from __future__ import annotations

import math
import os
import re
import subprocess

# For the ranks of a host that a batch system lends to the run: the unix time since when. It leaves
# the run before its own job ends.
BORROWED = "HVDTRAIN_BORROWED"
_ANSWER_SECONDS = 10.0
_TIME_LEFT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")  # days-hours:minutes:seconds


def slurm_job() -> str | None:
    """Return the ID of the Slurm job that holds this process; None for a rank on a lent host."""
    return None if BORROWED in os.environ else os.environ.get("SLURM_JOB_ID")


def borrowed_since() -> float | None:
    """Return the unix time since when this rank's host has been lent; None: it is not."""
    return float(os.environ[BORROWED]) if BORROWED in os.environ else None


def seconds_left(job: str) -> float | None:
    """Ask Slurm how long a job may still run: infinity without a limit; None: no answer."""
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%A %L"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # The ID of an array, or of a heterogeneous job, may stand for several jobs.
    answers = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line)
    return parse_time_left(answers.get(job, "").strip())


def parse_time_left(text: str) -> float | None:
    """Read Slurm's [days-][hours:]minutes:seconds or UNLIMITED; None for any other text."""
    if text == "UNLIMITED":
        return math.inf
    found = _TIME_LEFT.fullmatch(text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds
