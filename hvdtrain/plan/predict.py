"""Predict a step of a job on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.plan.cluster import Cluster
from hvdtrain.plan.collectives import all_reduce
from hvdtrain.plan.job import Job, StrategyCost
from hvdtrain.plan.overlap import Overlapped, Transfer, overlap
from hvdtrain.plan.strategies import COMPRESSIONS, handled, seconds, sent

_NEGLIGIBLE = 0.02  # fraction of a step


@dataclass(frozen=True)
class Prediction:
    """A predicted step.

    Args:
        ranks, strategy: world size and exchange strategy.
        step_seconds: time of the whole step.
        compute_seconds: of a rank's own work in it.
        exchange_seconds: time that the network is in use.
        exposed_seconds: time that the step waits for gradients after its last backward pass.
        sent_bytes: of gradients that a rank passes to collectives.
        samples_per_second: of all ranks.
        efficiency: fraction of linear scaling from one rank.
        limit: what to improve: compute, bandwidth, latency, or uneven (ranks have different numbers
            of micro-batches).
    """

    ranks: int
    strategy: str
    step_seconds: float
    compute_seconds: float
    exchange_seconds: float
    exposed_seconds: float
    sent_bytes: float
    samples_per_second: float
    efficiency: float
    limit: str


def predict(job: Job, cluster: Cluster, strategy: str, config: ExchangeConfig) -> Prediction:
    """Predict a step of `job` in which each rank holds the whole model.

    Args:
        strategy: a key of job.costs.
        config: provides the rank of powersgd and the ratio of topk.
    """
    passes = ceil(job.micro_batches / cluster.ranks)
    idle = cluster.ranks == 1 and strategy not in COMPRESSIONS
    cost = StrategyCost() if idle else job.costs[strategy]
    backward = job.backward_seconds + cost.before
    if cluster.ranks > 1:
        last = overlap(_transfers(job, cluster, strategy, config), backward)
    else:
        last = Overlapped(backward, backward + cost.after, 0.0)
    rest = passes * job.forward_seconds + (passes - 1) * job.backward_seconds
    rest += job.optimizer_seconds + job.other_seconds
    step = rest + last.done
    alone = job.micro_batches * (job.forward_seconds + job.backward_seconds)
    alone += job.optimizer_seconds + job.other_seconds
    return Prediction(
        ranks=cluster.ranks,
        strategy=strategy,
        step_seconds=step,
        compute_seconds=rest + backward + cost.after,
        exchange_seconds=last.sending,
        exposed_seconds=last.exposed,
        sent_bytes=_sent_bytes(job, strategy, config) if cluster.ranks > 1 else 0.0,
        samples_per_second=job.samples / step,
        efficiency=alone / (cluster.ranks * step),
        limit=_limit(job, cluster, strategy, config),
    )


def _transfers(
    job: Job, cluster: Cluster, strategy: str, config: ExchangeConfig
) -> Sequence[Transfer]:
    cost = job.costs[strategy]
    backward = job.backward_seconds + cost.before
    control = all_reduce(job.control_bytes, cluster) + cluster.launch_seconds
    beside = cluster.beside_seconds
    found = [Transfer(0.0, control, beside=beside)] if job.control_bytes else []
    for bucket in job.buckets:
        what = sent(bucket, strategy, config, job.element_bytes)
        first, again = seconds(what, cluster)
        size = handled(what.reduced, what.gathered, cluster.ranks)
        busy = size * cluster.busy_seconds_per_byte
        busy_again = handled(what.reduced_again, 0.0, cluster.ranks) * cluster.busy_seconds_per_byte
        found.append(
            Transfer(
                ready=bucket.ready * backward,
                seconds=cluster.launch_seconds + max(first, busy),
                busy=busy,
                after=cost.after * bucket.elements / job.parameters,
                again=cluster.launch_seconds + max(again, busy_again) if again else 0.0,
                beside=beside,
            )
        )
    return found


def _sent_bytes(job: Job, strategy: str, config: ExchangeConfig) -> float:
    return sum(sent(b, strategy, config, job.element_bytes).bytes for b in job.buckets)


def _limit(job: Job, cluster: Cluster, strategy: str, config: ExchangeConfig) -> str:
    """Limit of the step: compute, bandwidth, latency, or uneven numbers of micro-batches."""
    if cluster.ranks == 1:
        return "compute"
    now = _exposed(job, cluster, strategy, config)
    passes = ceil(job.micro_batches / cluster.ranks)
    step = passes * (job.forward_seconds + job.backward_seconds) + now
    if now < _NEGLIGIBLE * step:
        fair = job.micro_batches / cluster.ranks
        return "compute" if passes - fair < _NEGLIGIBLE * passes else "uneven"
    wide = [
        replace(link, bits_per_second=link.bits_per_second * 1e6)
        for link in (cluster.between, cluster.within)
    ]
    short = [replace(link, latency=0.0) for link in (cluster.between, cluster.within)]
    faster = {
        "bandwidth": replace(cluster, between=wide[0], within=wide[1], busy_seconds_per_byte=0.0),
        "latency": replace(
            cluster, between=short[0], within=short[1], launch_seconds=0.0, beside_seconds=0.0
        ),
    }
    gains = {n: now - _exposed(job, c, strategy, config) for n, c in faster.items()}
    best = max(gains, key=lambda name: gains[name])
    return best if gains[best] > _NEGLIGIBLE * step else "compute"


def _exposed(job: Job, cluster: Cluster, strategy: str, config: ExchangeConfig) -> float:
    backward = job.backward_seconds + job.costs[strategy].before
    return overlap(_transfers(job, cluster, strategy, config), backward).exposed
