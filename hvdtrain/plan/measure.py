"""`hvdtrain plan --measure`: a job and the cost of its collectives, measured on this host."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

from hvdtrain.bench.processes import QUIET, launch, measure, on_threads
from hvdtrain.plan.job import GradientBucket, JobProfile, StrategyCost

_SMALL, _LARGE = 1 << 10, 8 << 20  # bytes of an all-reduce
_WORKER = (sys.executable, "-m", "hvdtrain.bench.allreduce_worker")
# Commands for idle ranks, and for ranks that compute.
COLLECTIVES = (
    (*_WORKER, "horovod", str(_SMALL), str(_LARGE)),
    (*_WORKER, "horovod-computing", str(_SMALL)),
)
_SECONDS = ("forward_seconds", "backward_seconds", "optimizer_seconds", "other_seconds")


@dataclass(frozen=True)
class CollectiveCosts:
    """Costs of collectives on a network without cost; see Cluster.

    Args:
        launch_seconds: time of a short collective.
        busy_seconds_per_byte: per byte that a rank sends.
        contention_seconds: extra time of the short collective while the ranks compute.
    """

    launch_seconds: float
    busy_seconds_per_byte: float
    contention_seconds: float


def measure_job(flags: Sequence[str], at_once: int = 1) -> JobProfile:
    """Measure a job in processes that train at the same time and exchange nothing.

    Args:
        flags: flags of a run.
        at_once: number of processes: the ranks per host of the cluster, so that they share the
            memory as ranks would.

    Raises:
        UserError: the flags are wrong, or `plan` cannot measure such a run.
        BenchError: a process failed.
    """
    command = on_threads(1, [sys.executable, "-m", "hvdtrain.plan.worker", *flags, *QUIET])
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(lambda _: measure(command), range(at_once)))
    return mean_of([job_from(one["measured"]) for one in found])


def mean_of(jobs: Sequence[JobProfile]) -> JobProfile:
    """Mean of several processes' measurements of one job."""
    first = jobs[0]
    seconds: dict[str, Any] = {name: fmean(getattr(job, name) for job in jobs) for name in _SECONDS}
    costs = {
        name: StrategyCost(
            fmean(job.costs[name].before for job in jobs),
            fmean(job.costs[name].after for job in jobs),
        )
        for name in first.costs
    }
    ready = [fmean(job.buckets[i].ready for job in jobs) for i in range(len(first.buckets))]
    buckets = tuple(replace(b, ready=r) for b, r in zip(first.buckets, ready, strict=True))
    return replace(first, **(seconds | {"costs": costs, "buckets": buckets}))


def measure_costs() -> CollectiveCosts:
    """Measure two ranks of this host.

    Raises:
        BenchError: the ranks failed.
    """
    idle, computing = (
        measure(launch("gloo", 2, on_threads(1, command)))["seconds"] for command in COLLECTIVES
    )
    return costs_from(idle, computing, ranks=2)


def costs_from(
    idle: Mapping[str, float], computing: Mapping[str, float], ranks: int
) -> CollectiveCosts:
    """Compute costs from all-reduce times of `ranks` ranks on an unlimited network.

    Args:
        idle, computing: output of the two COLLECTIVES: bytes -> seconds.
    """
    seconds = {int(size): value for size, value in idle.items()}
    small, large = min(seconds), max(seconds)
    grown = max(0.0, seconds[large] - seconds[small])
    return CollectiveCosts(
        launch_seconds=seconds[small],
        busy_seconds_per_byte=grown / (large - small) / (2 * (ranks - 1) / ranks),
        contention_seconds=max(0.0, computing[str(small)] - seconds[small]),
    )


def job_from(content: dict[str, Any]) -> JobProfile:
    """Read a job from its JSON, as made by dataclasses.asdict."""
    known = {field.name for field in fields(JobProfile)}
    given = {name: value for name, value in content.items() if name in known}
    given["buckets"] = tuple(_bucket(bucket) for bucket in content["buckets"])
    given["costs"] = {name: StrategyCost(**cost) for name, cost in content["costs"].items()}
    return JobProfile(**given)


def _bucket(content: dict[str, Any]) -> GradientBucket:
    shapes = content["matrices"]
    matrices = None if shapes is None else tuple((int(r), int(c)) for r, c in shapes)
    return GradientBucket(content["elements"], content["ready"], matrices)
