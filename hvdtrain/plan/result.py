"""A plan: a job on a cluster of growing size, its layouts, its failures and its price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import exp, expm1, inf, sqrt
from typing import Any

from hvdtrain.errors import require
from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.plan.cluster import Cluster
from hvdtrain.plan.job import JobProfile
from hvdtrain.plan.layouts import ModelLayout, layouts, memory, step_seconds
from hvdtrain.plan.predict import COMPRESSIONS, Prediction, predict

# --- checkpoint interval and goodput under failures --------------------------


# Measured from a killed rank to the next step, see docs/benchmarks.md#recovery-times:
# most of RESTART_SECONDS is the start of the ranks.
ELASTIC_SECONDS = 0.4
RESTART_SECONDS = 8.5


@dataclass(frozen=True)
class FailureModel:
    """Rate and cost of failures.

    Args:
        mtbf: seconds between two failures of any host of the job; inf: no failures.
        save_seconds: time by which a checkpoint stalls the steps.
        restart_seconds: from a failure to the next step.
        redone: whether the steps since the last checkpoint are lost. In an elastic run the
            surviving ranks have the state, and no step is lost.
    """

    mtbf: float
    save_seconds: float
    restart_seconds: float
    redone: bool = True

    def __post_init__(self) -> None:
        require(self.mtbf > 0, f"the time between failures must be > 0, not {self.mtbf}")
        require(self.save_seconds >= 0, "a checkpoint takes 0 s or more")
        require(self.restart_seconds >= 0, "a restart takes 0 s or more")


def young(failures: FailureModel) -> float:
    """Seconds of training between two checkpoints that minimize the lost time, to first order.

    Young, "A first order approximation to the optimum checkpoint interval" (1974).
    """
    return sqrt(2 * failures.save_seconds * failures.mtbf)


def daly(failures: FailureModel) -> float:
    """Like `young`, for saves that are not short relative to the time between failures.

    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006),
    equation 37.
    """
    save, mtbf = failures.save_seconds, failures.mtbf
    if mtbf == inf:
        return inf
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return sqrt(2 * save * mtbf) * (1 + sqrt(ratio) / 3 + ratio / 9) - save


def goodput(failures: FailureModel, interval: float) -> float:
    """Fraction of the time spent in steps that count; 1 without failures and saves.

    If steps are redone, this is Daly's expectation for random failures at a constant rate, which
    may also occur during saves and starts. Otherwise only saves and starts are lost.

    Args:
        interval: seconds of training between two checkpoints.
    """
    require(interval > 0, f"checkpoints are some time apart, not {interval} s")
    saving = 1.0 if interval == inf else interval / (interval + failures.save_seconds)
    if failures.mtbf == inf:
        return saving
    if not failures.redone:
        return saving * failures.mtbf / (failures.mtbf + failures.restart_seconds)
    lengths = (interval + failures.save_seconds) / failures.mtbf
    starts = failures.restart_seconds / failures.mtbf
    if starts + lengths > 700:  # never finishes: the exponential would overflow
        return 0.0
    expected = failures.mtbf * exp(starts) * expm1(lengths)
    return interval / expected


# --- the plan ----------------------------------------------------------------


_SAVE_BYTES_PER_SECOND = 1e9  # rate of copying a checkpoint while steps wait, if not measured
_MILLION = 1e6


@dataclass(frozen=True)
class Terms:
    """Parameters of a plan in addition to the job and the cluster.

    Args:
        exchange: provides the rank of powersgd and the ratio of topk.
        strategies: gradient exchange strategies, from job.costs.
        memory_bytes: memory of a rank; None: unknown.
        mtbf: seconds between failures of one host; inf: no failures are planned for.
        price: per host and hour, in any currency; None: unknown.
        save_seconds: time by which a checkpoint stalls the steps; None: computed from the state's
            size.
        weak: the batch grows with the ranks: the job's batch is for one rank.
    """

    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    strategies: Sequence[str] = ("dense",)
    memory_bytes: float | None = None
    mtbf: float = inf
    price: float | None = None
    save_seconds: float | None = None
    weak: bool = False


@dataclass(frozen=True)
class Placed:
    """A layout on the whole cluster.

    Args:
        layout: the layout.
        memory_bytes: per rank.
        fits: whether it fits; None: the memory of a rank is unknown.
        step_seconds: step time.
        price: price of a million samples, failures included; None: unknown.
    """

    layout: ModelLayout
    memory_bytes: float
    fits: bool | None
    step_seconds: float
    price: float | None


@dataclass(frozen=True)
class CheckpointPlan:
    """Checkpoints and failures on the whole cluster.

    Args:
        interval_seconds: time between two checkpoints (Daly).
        interval_steps: the same interval in steps of the recommended layout.
        supervised: fraction of the time in steps that count under `hvdtrain launch`.
        elastic: the same in an elastic run, which loses no step.
    """

    interval_seconds: float
    interval_steps: int
    supervised: float
    elastic: float


@dataclass(frozen=True)
class PlanResult:
    """Result of `hvdtrain plan`.

    Args:
        job, cluster, terms: inputs as given: with terms.weak, the job of one rank.
        scaling: predictions for every number of hosts and strategy.
        placed: layouts on all hosts, the fastest first.
        best: the recommended layout, see _best; on identical hosts the fastest is the cheapest.
        saving: None: no failures are planned for.
        unknown_of_the_job: sentences on unknown properties of the job.
        unknown: sentences on everything unknown, including the job's.
    """

    job: JobProfile
    cluster: Cluster
    terms: Terms
    scaling: Sequence[tuple[int, Prediction]]
    placed: Sequence[Placed]
    best: Placed | None
    saving: CheckpointPlan | None
    unknown_of_the_job: Sequence[str]
    unknown: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON, which `hvdtrain plan --from` also accepts."""
        return {
            "benchmark": "plan",
            "job": asdict(self.job),
            "cluster": asdict(self.cluster),
            "scaling": [{"hosts": hosts, **asdict(found)} for hosts, found in self.scaling],
            "layouts": [asdict(one) | {"flags": one.layout.flags} for one in self.placed],
            "best": None if self.best is None else self.best.layout.flags,
            "saving": None if self.saving is None else asdict(self.saving),
            "unknown_of_the_job": list(self.unknown_of_the_job),
            "unknown": list(self.unknown),
        }


def make_plan(
    job: JobProfile,
    cluster: Cluster,
    terms: Terms,
    of_job: Sequence[str],
    of_cluster: Sequence[str],
) -> PlanResult:
    """Make a plan.

    Args:
        cluster: at its largest size.
        of_job, of_cluster: sentences on unknown properties of each.
    """
    scaling = [
        (hosts, predict(_grown(job, part, terms), part, strategy, terms.exchange))
        for hosts in host_numbers(cluster.hosts)
        for part in [replace(cluster, hosts=hosts)]
        for strategy in terms.strategies
    ]
    whole = _grown(job, cluster, terms)
    failures = _failures(whole, cluster, terms)
    # A free save would be made all the time, but there is only one state per step.
    shortest = min(found.step_seconds for hosts, found in scaling if hosts == cluster.hosts)
    interval = max(shortest, daly(failures))
    useful = goodput(failures, interval)
    placed = [
        _place(whole, cluster, terms, one, useful)
        for one in layouts(whole, cluster, terms.strategies)
    ]
    placed.sort(key=lambda one: one.step_seconds)
    best = _best(placed)
    saving = None
    if terms.mtbf != inf:
        elastic = replace(failures, restart_seconds=ELASTIC_SECONDS, redone=False)
        step = (best or placed[0]).step_seconds
        saving = CheckpointPlan(
            interval, max(1, round(interval / step)), useful, goodput(elastic, interval)
        )
    unknown = [*of_job, *of_cluster, *_unknown(job, terms)]
    return PlanResult(job, cluster, terms, scaling, placed, best, saving, of_job, unknown)


def _best(placed: Sequence[Placed]) -> Placed | None:
    """Return the fastest layout that fits. Layouts whose ranks hold the whole model come first, and
    compressed exchanges are excluded: the others are slower than predicted, or change the curve."""
    fitting = [
        one for one in placed if one.fits is not False and one.layout.strategy not in COMPRESSIONS
    ]
    whole = [one for one in fitting if one.layout.replica == 1]
    return next(iter([*whole, *fitting]), None)


def host_numbers(hosts: int) -> list[int]:
    """1, 2, 4, ... and `hosts` itself."""
    powers = [1 << n for n in range(hosts.bit_length()) if 1 << n < hosts]
    return [*powers, hosts]


def _grown(job: JobProfile, cluster: Cluster, terms: Terms) -> JobProfile:
    return replace(job, micro_batches=job.micro_batches * cluster.ranks) if terms.weak else job


def _failures(job: JobProfile, cluster: Cluster, terms: Terms) -> FailureModel:
    state = job.parameter_bytes + job.optimizer_bytes
    save = terms.save_seconds
    if save is None:
        save = state / _SAVE_BYTES_PER_SECOND
    return FailureModel(terms.mtbf / cluster.hosts, save, RESTART_SECONDS)


def _place(
    job: JobProfile, cluster: Cluster, terms: Terms, layout: ModelLayout, useful: float
) -> Placed:
    needed = memory(job, layout, cluster.ranks)
    fits = None if terms.memory_bytes is None else needed <= terms.memory_bytes
    step = step_seconds(job, cluster, layout, terms.exchange)
    price = None
    if terms.price is not None and useful > 0:
        hours = step / job.samples * _MILLION / 3600 / useful
        price = hours * terms.price * cluster.hosts
    return Placed(layout, needed, fits, step, price)


def _unknown(job: JobProfile, terms: Terms) -> list[str]:
    found = [
        "slow ranks, other jobs on the network, late data and evaluations: not included",
    ]
    if job.activation_bytes is None:
        found.append("activations: memory includes only parameters, gradients and optimizer state")
    if not job.blocks or not job.block_bytes:
        found.append("blocks of the model: layouts in which ranks share it are omitted")
    else:
        found.append(
            "layouts in which ranks share the model: estimated from the whole model's times, with "
            "even matrices and stages; parallel.context is omitted"
        )
    if terms.memory_bytes is None:
        found.append("memory of a rank (--memory), and so whether a layout fits")
    if terms.mtbf == inf:
        found.append("failures (--mtbf), and so goodput and the checkpoint interval")
    elif terms.save_seconds is None:
        found.append("how long a checkpoint stalls the steps: 1 GB/s is assumed")
    if terms.mtbf != inf:
        found.append(
            f"your restart time: {RESTART_SECONDS:g} s, {ELASTIC_SECONDS:g} s in an elastic run, "
            "as measured with 4 ranks of a tiny model; `hvdtrain report` of a run shows yours"
        )
    if terms.price is None:
        found.append("the price of a host (--price)")
    return found
