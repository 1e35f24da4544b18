"""Cost of elasticity without failures, and cost of a failure."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.bench.jobs import (
    ControlledJob,
    JobTurn,
    median_range,
    step_time_ratios,
    take_turns,
    train,
)
from hvdtrain.bench.processes import BenchError
from hvdtrain.bench.report import BenchMetric, Report
from hvdtrain.launch.commands import elastic_horovodrun, horovodrun

RANKS = 2
_WARM_UP_STEPS = 5

Lines = Sequence[Mapping[str, Any]]


def elastic(flags: Sequence[str], steps: int, rounds: int) -> Report:
    """Compare the step time of an elastic and a non-elastic job on 2 ranks of this host.

    Both are whole jobs under horovodrun. They take turns: while one runs, the other one is frozen
    together with its launcher and watchdogs. The watchdogs of the non-elastic job stay suspended.
    """
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        command = train(sys.executable, flags, Path(other))
        jobs = {
            "elastic": _elastic_job(flags, RANKS, f"localhost:{RANKS}", Path(one), patient=True),
            "not elastic": ControlledJob(horovodrun(RANKS, command), Path(other), patient=True),
        }
        with jobs["elastic"], jobs["not elastic"]:
            for name, job in jobs.items():
                job.wait_for_more(_WARM_UP_STEPS)
                if name == "not elastic":
                    job.suspend_watchdogs()
                job.freeze()
            used = {name: job.seconds_outside_ranks() for name, job in jobs.items()}
            turns = take_turns(jobs, steps, rounds)
            used = {name: job.seconds_outside_ranks() - used[name] for name, job in jobs.items()}
    return _compare(turns, used)


def _compare(turns: Mapping[str, Sequence[JobTurn]], used: Mapping[str, float]) -> Report:
    found = step_time_ratios(turns, "elastic", "not elastic")
    metrics = [BenchMetric(name, "ms/step", [t.step * 1000 for t in turns[name]]) for name in turns]
    metrics.append(BenchMetric("elastic / not elastic", "x", found, at_most=1.005))
    for name in turns:
        share = 100 * used[name] / sum(turn.awake for turn in turns[name])
        metrics.append(BenchMetric(f"{name}: launcher and watchdogs", "% of a core", [share]))
    low, high = median_range(found)
    return Report("elastic", metrics, {"median_of_the_ratio": f"{low:.4f} to {high:.4f} (95 %)"})


def recovery(
    flags: Sequence[str], steps: int, kills: int, np: int, hosts: str, root: Path
) -> Report:
    """Kill a rank of an elastic job with SIGKILL repeatedly.

    Args:
        steps: number of steps before each kill.
        np: ranks.
        hosts: "name:slots,name:slots"; this host must be one of them.
        root: a directory that all hosts share.
    """
    root.mkdir(parents=True, exist_ok=True)
    killed_at = []
    with (
        tempfile.TemporaryDirectory(dir=root) as directory,
        _elastic_job(flags, np, hosts, Path(directory)) as job,
    ):
        for _ in range(kills):
            _wait_for_ranks(job, np)
            job.wait_for_more(steps)
            killed_at.append(time.time())
            job.kill_one()
            job.wait_for(lambda lines: lines[-1]["world_size"] < np, "the kill's effect")
        _wait_for_ranks(job, np)
        job.wait_for_more(1)
        lines, events = list(job.lines()), job.events()
    found = [recovered(lines, events, since, np) for since in killed_at]
    metrics = [
        BenchMetric("pause after a kill", "s", [one.pause for one in found]),
        BenchMetric("of which re-initialization", "s", [one.initialization for one in found]),
        BenchMetric("pause when the new rank joins", "s", [one.joining for one in found]),
        BenchMetric("until all ranks are back", "s", [one.whole for one in found]),
        BenchMetric(
            "step", "s", [line["step_seconds"] for line in lines if line["world_size"] == np]
        ),
    ]
    per_kill = [f"{one.pause:.2f} ({one.initialization:.2f})" for one in found]
    return Report("recovery", metrics, {"ranks": np, "pause_of_each_kill": " ".join(per_kill)})


@dataclass(frozen=True)
class Recovery:
    """Seconds lost to a kill.

    Args:
        pause: from the kill, or from the last step if it ended after the kill, to the end of the
            next step
        initialization: part of the pause, from its detection by the ranks until they could continue
        joining: from the last step without the new rank to the first step with it
        whole: from the kill until the new rank takes part
    """

    pause: float
    initialization: float
    joining: float
    whole: float


def recovered(lines: Lines, events: Lines, since: float, np: int) -> Recovery:
    """Measure the recovery from a kill.

    Args:
        lines, events: contents of metrics.jsonl and events.jsonl.
        since: time of the kill, Unix time.
        np: number of ranks before the kill and after the recovery.

    Raises:
        BenchError: the kill had no effect on the job.
    """
    starts = [e for e in events if e["event"] == "start" and e["time"] >= since]
    failure = next((e for e in starts if e["cause"] == "failure"), None)
    back = next((e for e in starts if e["world_size"] == np), None)
    if failure is None or back is None:
        raise BenchError("the killed rank was not detected, or not replaced")
    before, after = _around(lines, failure["time"])
    last, first = _around(lines, back["time"])
    return Recovery(after - max(before, since), failure["seconds"], first - last, first - since)


def _around(lines: Lines, at: float) -> tuple[float, float]:
    """Times of the last step before `at` and of the first step after it."""
    times = [line["time"] for line in lines]
    return max(t for t in times if t <= at), min(t for t in times if t > at)


def _wait_for_ranks(job: ControlledJob, np: int) -> None:
    job.wait_for(lambda lines: bool(lines) and lines[-1]["world_size"] == np, f"{np} ranks train")


def _elastic_job(
    flags: Sequence[str], np: int, hosts: str, root: Path, patient: bool = False
) -> ControlledJob:
    discover = [sys.executable, "-m", "hvdtrain.cli", "discover", "--hosts", hosts]
    command = train(sys.executable, flags, root)
    return ControlledJob(elastic_horovodrun(np, 1, np, discover, command), root, patient)
