"""A plan: a job on a cluster of growing size, its layouts, its failures and its price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any

from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.plan.cluster import Cluster
from hvdtrain.plan.goodput import ELASTIC_SECONDS, RESTART_SECONDS, Failures, daly, goodput
from hvdtrain.plan.job import Job
from hvdtrain.plan.layouts import Layout, layouts, memory, step_seconds
from hvdtrain.plan.predict import Prediction, predict
from hvdtrain.plan.strategies import COMPRESSIONS

_SAVE_BYTES_PER_SECOND = 1e9  # by which a checkpoint is copied while steps wait, if not measured
_MILLION = 1e6


@dataclass(frozen=True)
class Terms:
    """What a plan is to reckon with, beside job and cluster.

    Args:
        exchange: has the rank of powersgd and the ratio of topk.
        strategies: ways to exchange gradients, of job.costs.
        memory_bytes: of a rank; None: not known.
        mtbf: seconds between failures of one host; inf: none are planned for.
        price: of a host for an hour, in any currency; None: not known.
        save_seconds: by which a checkpoint holds up the steps; None: from the bytes of the state.
        weak: the batch grows with the ranks: the job's is that of one.
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
        layout: which.
        memory_bytes: of a rank.
        fits: None: the memory of a rank is not known.
        step_seconds: of a step.
        price: of a million samples, failures counted; None: not known.
    """

    layout: Layout
    memory_bytes: float
    fits: bool | None
    step_seconds: float
    price: float | None


@dataclass(frozen=True)
class Saving:
    """Checkpoints and failures on the whole cluster.

    Args:
        interval_seconds: between two checkpoints (Daly), and
        interval_steps: the same of the recommended layout.
        supervised: fraction of the time in steps that count under `hvdtrain launch`, and
        elastic: in an elastic run, which loses no step.
    """

    interval_seconds: float
    interval_steps: int
    supervised: float
    elastic: float


@dataclass(frozen=True)
class Outlook:
    """What `hvdtrain plan` shows.

    Args:
        job, cluster, terms: what it is made from, as they were given: with terms.weak, the job of
            one rank.
        scaling: of every number of hosts and strategy.
        placed: layouts on all hosts, the fastest first.
        best: the recommended one, see _best; on equal hosts the fastest is the cheapest.
        saving: None: no failures are planned for.
        unknown_of_the_job: sentences on what the job is not known by, and
        unknown: on all that it does not know, these among it.
    """

    job: Job
    cluster: Cluster
    terms: Terms
    scaling: Sequence[tuple[int, Prediction]]
    placed: Sequence[Placed]
    best: Placed | None
    saving: Saving | None
    unknown_of_the_job: Sequence[str]
    unknown: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, from which `hvdtrain plan --from` starts too."""
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


def look(
    job: Job, cluster: Cluster, terms: Terms, of_job: Sequence[str], of_cluster: Sequence[str]
) -> Outlook:
    """The plan.

    Args:
        cluster: of its largest size.
        of_job, of_cluster: sentences on what each is not known by.
    """
    scaling = [
        (hosts, predict(_grown(job, part, terms), part, strategy, terms.exchange))
        for hosts in host_numbers(cluster.hosts)
        for part in [replace(cluster, hosts=hosts)]
        for strategy in terms.strategies
    ]
    whole = _grown(job, cluster, terms)
    failures = _failures(whole, cluster, terms)
    # A save that costs nothing would be made all the time; there is one state a step.
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
        saving = Saving(
            interval, max(1, round(interval / step)), useful, goodput(elastic, interval)
        )
    unknown = [*of_job, *of_cluster, *_unknown(job, terms)]
    return Outlook(job, cluster, terms, scaling, placed, best, saving, of_job, unknown)


def _best(placed: Sequence[Placed]) -> Placed | None:
    """The fastest that fits. Ranks that hold the whole model come first, as do sums of all of each
    gradient: the others are slower than their arithmetic says, or train another curve."""
    fitting = [
        one for one in placed if one.fits is not False and one.layout.strategy not in COMPRESSIONS
    ]
    whole = [one for one in fitting if one.layout.replica == 1]
    return next(iter([*whole, *fitting]), None)


def host_numbers(hosts: int) -> list[int]:
    """1, 2, 4, ... and the number itself."""
    powers = [1 << n for n in range(hosts.bit_length()) if 1 << n < hosts]
    return [*powers, hosts]


def _grown(job: Job, cluster: Cluster, terms: Terms) -> Job:
    return replace(job, micro_batches=job.micro_batches * cluster.ranks) if terms.weak else job


def _failures(job: Job, cluster: Cluster, terms: Terms) -> Failures:
    state = job.parameter_bytes + job.optimizer_bytes
    save = terms.save_seconds
    if save is None:
        save = state / _SAVE_BYTES_PER_SECOND
    return Failures(terms.mtbf / cluster.hosts, save, RESTART_SECONDS)


def _place(job: Job, cluster: Cluster, terms: Terms, layout: Layout, useful: float) -> Placed:
    needed = memory(job, layout, cluster.ranks)
    fits = None if terms.memory_bytes is None else needed <= terms.memory_bytes
    step = step_seconds(job, cluster, layout, terms.exchange)
    price = None
    if terms.price is not None and useful > 0:
        hours = step / job.samples * _MILLION / 3600 / useful
        price = hours * terms.price * cluster.hosts
    return Placed(layout, needed, fits, step, price)


def _unknown(job: Job, terms: Terms) -> list[str]:
    found = [
        "slow ranks, other jobs on the network, data that comes late, evaluations: none is in it",
    ]
    if job.activation_bytes is None:
        found.append("activations: memory is that of parameters, gradients and optimizer alone")
    if not job.blocks or not job.block_bytes:
        found.append("blocks of the model: layouts on which ranks share it are left out")
    else:
        found.append(
            "layouts on which ranks share the model: from the whole model's times, as if matrices "
            "and stages divided evenly; parallel.context is left out"
        )
    if terms.memory_bytes is None:
        found.append("memory of a rank (--memory): whether a layout fits")
    if terms.mtbf == inf:
        found.append("failures (--mtbf): goodput and the time between checkpoints")
    elif terms.save_seconds is None:
        found.append("by how much a checkpoint holds up the steps: 1 GB/s is assumed")
    if terms.mtbf != inf:
        found.append(
            f"your restarts: {RESTART_SECONDS:g} s, {ELASTIC_SECONDS:g} s in an elastic run, as "
            "measured with 4 ranks of a tiny model; read `hvdtrain report` of a run"
        )
    if terms.price is None:
        found.append("the price of a host (--price)")
    return found
