"""`hvdtrain audit --same A B`: whether two runs are bitwise identical."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.run_files.events_file import each_line
from hvdtrain.run_files.run_directory import RunDirectory

# How a step was computed and how long it took, not its results.
_CIRCUMSTANCES = {"world_size", "time", "generation", "healed"}
_TIMES = ("_seconds", "_per_second")
HASH = "state_hash"


@dataclass(frozen=True)
class Comparison:
    """Comparison of two runs, step by step, as far as both have progressed.

    Args:
        runs: their directories
        steps: number of steps compared, which both have logged
        last_step: the last of these steps
        hashes: steps after which the hash of parameters and optimizer state was compared
        first_step: the first step whose metrics differ; None: no metric differs
        differing: name of a metric of that step -> its value in each run
    """

    runs: tuple[str, str]
    steps: int
    last_step: int
    hashes: int
    first_step: int | None
    differing: dict[str, tuple[Any, Any]]

    @property
    def same(self) -> bool:
        return self.first_step is None

    def to_json(self) -> str:
        return json.dumps({"same": self.same, **asdict(self)}, indent=1)

    def to_text(self) -> str:
        both = f"{self.runs[0]} and {self.runs[1]}"
        compared = f"{self.steps} steps up to {self.last_step} compared"
        if self.first_step is not None:
            values = [f"  {n}: {a} and {b}" for n, (a, b) in self.differing.items()]
            head = f"{both}: NOT identical; the first step that differs is {self.first_step}"
            return "\n".join([f"{head} ({compared})", *values])
        if not self.hashes:
            return (
                f"{both}: no metric differs ({compared}), but states were not compared: no step "
                f"has a {HASH} in both runs (train.replica_check_every, checkpoint.every)"
            )
        return (
            f"{both}: bitwise identical ({compared}; hashes of parameters and optimizer state "
            f"after {self.hashes} of them)"
        )


def compare(a: Path, b: Path) -> Comparison:
    """Compare the steps that both runs have logged.

    Raises:
        UserError: a directory is not a run directory, or no step was logged by both runs.
    """
    ours, theirs = _steps(a), _steps(b)
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise UserError(f"{a} and {b} have no step in common: nothing can be compared")
    hashes, first_step, differing = 0, None, {}
    for step in common:
        one, other = ours[step], theirs[step]
        # The metrics of a step also depend on checkpoint.every, eval.every and similar keys.
        names = [name for name in one if name in other]
        differing = {n: (one[n], other[n]) for n in names if not _equal(one[n], other[n])}
        if differing:
            first_step = step
            break
        hashes += HASH in names
    return Comparison((str(a), str(b)), len(common), common[-1], hashes, first_step, differing)


def _steps(path: Path) -> dict[int, dict[str, Any]]:
    """The metrics of each kept step of a run."""
    metrics = RunDirectory(path).metrics
    try:
        lines = [line for line in each_line(metrics) if line and isinstance(line.get("step"), int)]
    except OSError as error:
        raise UserError(
            f"{metrics}: cannot be read ({error.strerror}); is it a run directory?"
        ) from None
    return {line["step"]: {n: v for n, v in line.items() if _counts(n)} for line in lines}


def _counts(name: str) -> bool:
    return name not in _CIRCUMSTANCES and not name.endswith(_TIMES)


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b) or (a != a and b != b)  # NaN equals NaN here
