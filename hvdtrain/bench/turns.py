"""Alternation of jobs: while one trains, the others are frozen."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.bench.jobs import Job


@dataclass(frozen=True)
class Turn:
    """Seconds per step in one turn of a job, and seconds for which the job was not frozen."""

    step: float
    awake: float


def take_turns(jobs: Mapping[str, Job], steps: int, rounds: int) -> dict[str, list[Turn]]:
    """Run every job for `steps` steps in each round, alternating the order.

    Args:
        jobs: jobs by name; they are frozen before and after.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in jobs}
    for number in range(rounds):
        for name in sorted(jobs, reverse=number % 2 == 1):
            turns[name].append(_one_turn(jobs[name], steps))
    return turns


def _one_turn(job: Job, steps: int) -> Turn:
    """Run one turn, ignoring the step in which the job was last frozen."""
    start = time.monotonic()
    job.thaw()
    seconds = seconds_a_step(job, steps)
    job.freeze()
    return Turn(seconds, time.monotonic() - start)


def seconds_a_step(job: Job, steps: int) -> float:
    """Seconds per step over the next steps of a training job, after one step that is ignored."""
    begin = len(job.lines())
    job.wait_for_more(steps + 1)
    times = [line["time"] for line in job.lines()[begin : begin + steps + 1]]
    return float(times[-1] - times[0]) / steps


def ratios(turns: Mapping[str, Sequence[Turn]], one: str, other: str) -> list[float]:
    """Ratio of the seconds per step, round by round."""
    return [a.step / b.step for a, b in zip(turns[one], turns[other], strict=True)]


def median_range(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median of the distribution of `values`.

    Uses order statistics (David and Nagaraja, Order Statistics, 7.1) in the normal approximation of
    the binomial; no distribution is assumed.
    """
    ordered, count = sorted(values), len(values)
    reach = 1.96 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - reach) - 1)
    high = min(count - 1, math.ceil(count / 2 + reach))
    return ordered[low], ordered[high]
