"""Files in RUN/profile. Imports neither torch nor Horovod.

    rank_00003_node2.10.pt.trace.json.gz   torch's trace of a rank, from step 10 on
    rank_00003_node2.10.json               its measurements: RankProfile
    timeline.10.json                       Horovod's timeline of the same steps, from rank 0

If a run restarts or enters a new elastic generation inside the range, each part has its own group
of files, distinguished by the first step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.files import write_atomic
from hvdtrain.untrusted import checked, number, read_json

TRACE = ".pt.trace.json.gz"  # suffix that TensorBoard's profile plugin expects
# After their backward pass, ranks exchange a number under this name plus the step number. Horovod
# records when each rank was ready only for names that it has not seen before.
READY = "ready.step_"
COMPUTE = ("data", "forward", "backward", "optimizer")  # phases that count as computation
_PHASES = {*COMPUTE, "comm_exposed"}


@dataclass(frozen=True)
class RankProfile:
    """Measurements of one rank over some steps.

    Args:
        steps: first step, and the one after the last
        phases: seconds per phase; their sum is the wall time
        wall_seconds: from before the first step to after the last one's callbacks
        inflight_seconds: see Exchange
        host_peak_bytes: resident memory per phase; None if unknown
        device_peak_bytes: tensor memory per phase; None without a GPU
        device: "cpu" or "cuda"
    """

    rank: int
    host: str
    world_size: int
    steps: tuple[int, int]
    phases: dict[str, float]
    wall_seconds: float
    inflight_seconds: float
    host_peak_bytes: dict[str, int] | None
    device_peak_bytes: dict[str, int] | None
    device: str


def rank_path(directory: Path, rank: int, host: str, first: int, suffix: str) -> Path:
    """suffix: TRACE or ".json"."""
    return directory / f"rank_{rank:05}_{host}.{first}{suffix}"


def timeline_path(directory: Path, first: int) -> Path:
    return directory / f"timeline.{first}.json"


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    """Write the measurements as JSON; raise OSError on failure."""
    write_atomic(path, (json.dumps(figures) + "\n").encode())


def clear(directory: Path, first: int) -> None:
    """Delete the files of steps from `first` on, because the run repeats these steps."""
    for path in directory.iterdir():
        name = path.name.removesuffix(TRACE).removesuffix(".json")
        _, _, step = name.rpartition(".")
        if name != path.name and step.isdigit() and int(step) >= first:
            path.unlink(missing_ok=True)


def read_profiles(directory: Path) -> Iterator[tuple[RankProfile, Path]]:
    """The measurements of each rank and part, with the path of the trace, by first step and rank.

    Invalid files are skipped.
    """
    found = []
    for path in directory.glob("rank_*.json"):
        with suppress(OSError, ValueError):
            content = read_json(path)
            if isinstance(content.get("steps"), list):  # JSON has no tuples
                content["steps"] = tuple(content["steps"])
            profile = checked(RankProfile, content)
            seconds = [profile.wall_seconds, profile.inflight_seconds, *profile.phases.values()]
            if None in map(number, seconds) or profile.wall_seconds <= 0:
                raise ValueError("its times are no numbers")
            if not set(profile.phases) >= _PHASES or profile.steps[0] >= profile.steps[1]:
                raise ValueError("it lacks phases or steps")
            found.append((profile, path.with_name(path.name.removesuffix(".json") + TRACE)))
    return iter(sorted(found, key=lambda one: (one[0].steps[0], one[0].rank)))
