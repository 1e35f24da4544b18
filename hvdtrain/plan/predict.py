"""Predict a step of a job on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.plan.cluster import Cluster, all_gather, all_reduce
from hvdtrain.plan.job import GradientBucket, JobProfile, StrategyCost

# --- bytes that each exchange strategy sends ---------------------------------


# These compress on one rank too, when nothing is sent.
COMPRESSIONS = ("topk", "powersgd")
_INDEX_BYTES = 4  # with each value of topk


@dataclass(frozen=True)
class Sent:
    """Bytes of a bucket that a rank passes to collectives in a step.

    Args:
        reduced: all-reduced once its gradients are ready.
        gathered: all-gathered at the same point.
        reduced_again: all-reduced after the first result has arrived.
    """

    reduced: float = 0.0
    gathered: float = 0.0
    reduced_again: float = 0.0

    @property
    def bytes(self) -> float:
        return self.reduced + self.gathered + self.reduced_again


def sent(
    bucket: GradientBucket, strategy: str, config: ExchangeConfig, element_bytes: int = 4
) -> Sent:
    """Bytes that `strategy` sends for a bucket.

    Args:
        config: provides the rank of powersgd and the ratio of topk.
        element_bytes: bytes per element of an uncompressed gradient.

    Raises:
        ValueError: powersgd with a bucket whose shapes are unknown.
    """
    if strategy == "topk":
        count = max(1, round(config.ratio * bucket.elements))
        return Sent(gathered=count * (_INDEX_BYTES + element_bytes))
    if strategy == "powersgd":
        return _powersgd(bucket, config.rank, element_bytes)
    size = element_bytes if strategy == "dense" else 2
    return Sent(reduced=bucket.elements * size)


def seconds(what: Sent, cluster: Cluster) -> tuple[float, float]:
    """Seconds on the network: (first transfer, second transfer after the first result)."""
    first = all_reduce(what.reduced, cluster) if what.reduced else 0.0
    first += all_gather(what.gathered, cluster) if what.gathered else 0.0
    again = all_reduce(what.reduced_again, cluster) if what.reduced_again else 0.0
    return first, again


def handled(size: float, gathered: float, ranks: int) -> float:
    """Bytes that a rank sends in a ring all-reduce of `size` and an all-gather of `gathered`."""
    return 2 * (ranks - 1) / ranks * size + (ranks - 1) * gathered


def _powersgd(bucket: GradientBucket, rank: int, element_bytes: int) -> Sent:
    if bucket.matrices is None:
        raise ValueError("powersgd: the shapes of the parameters are not known")
    thin = [(r, c) for r, c in bucket.matrices if (r + c) * rank < r * c]
    whole = bucket.elements - sum(r * c for r, c in thin)
    ps, qs = sum(r for r, _ in thin) * rank, sum(c for _, c in thin) * rank
    if not thin:
        return Sent(reduced=bucket.elements * element_bytes)
    return Sent(reduced=(ps + whole) * element_bytes, reduced_again=qs * element_bytes)


# --- overlap of transfers with the backward pass -----------------------------


@dataclass(frozen=True)
class BucketTransfer:
    """A collective of one bucket.

    Args:
        ready: seconds of the backward pass after which it can begin.
        seconds: time that it occupies the network; transfers are sent one after the other.
        busy: part of `seconds` taken from the processor that computes the backward pass.
        after: seconds of arithmetic on the received data.
        again: seconds of a second collective that follows.
        contention: extra seconds if it begins before the pass is over.
    """

    ready: float
    seconds: float
    busy: float = 0.0
    after: float = 0.0
    again: float = 0.0
    contention: float = 0.0


@dataclass(frozen=True)
class Overlapped:
    """Seconds since the beginning of the backward pass.

    Args:
        computed: when the pass itself is done.
        done: when all gradients of the global batch are complete.
        sending: how long the network was in use.
    """

    computed: float
    done: float
    sending: float

    @property
    def exposed(self) -> float:
        """Seconds that the step waits after its last backward pass."""
        return self.done - self.computed


def overlap(transfers: Sequence[BucketTransfer], backward: float) -> Overlapped:
    """Overlap bucket by bucket: each is sent when it is ready and the previous one has arrived.

    Args:
        transfers: in the order in which they are sent.
        backward: seconds of the pass if nothing were sent.
    """
    sent: list[tuple[float, float, float]] = []  # beginning, end, busy
    free = 0.0
    for transfer in transfers:
        begin = max(free, _when(transfer.ready, sent))
        free = begin + transfer.seconds
        if begin < _when(backward, sent):
            free += transfer.contention
        sent.append((begin, free, min(transfer.busy, transfer.seconds)))
    computed = _when(backward, sent)
    now = computed
    for transfer, (_, end, _) in zip(transfers, sent, strict=True):
        now = max(now, end) + transfer.after + transfer.again
    sending = sum(transfer.seconds + transfer.again for transfer in transfers)
    return Overlapped(computed, now, sending)


def _when(work: float, sent: Sequence[tuple[float, float, float]]) -> float:
    """Time at which `work` seconds of computing are done, given the concurrent transfers."""
    now, done = 0.0, 0.0
    for begin, end, busy in sent:
        if done + begin - now >= work:
            break
        done += begin - now
        gained = end - begin - busy
        if done + gained >= work:
            return begin + (work - done) * (end - begin) / gained if gained > 0 else begin
        now, done = end, done + gained
    return now + work - done


_NEGLIGIBLE = 0.02  # fraction of a step


@dataclass(frozen=True)
class Prediction:
    """A predicted step.

    Args:
        ranks, strategy: world size and exchange strategy.
        step_seconds: time of the whole step.
        compute_seconds: seconds of a rank's own work in the step.
        exchange_seconds: time that the network is in use.
        exposed_seconds: time that the step waits for gradients after its last backward pass.
        sent_bytes: bytes of gradients that a rank passes to collectives.
        samples_per_second: samples per second of all ranks.
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


def predict(job: JobProfile, cluster: Cluster, strategy: str, config: ExchangeConfig) -> Prediction:
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
    job: JobProfile, cluster: Cluster, strategy: str, config: ExchangeConfig
) -> Sequence[BucketTransfer]:
    cost = job.costs[strategy]
    backward = job.backward_seconds + cost.before
    control = all_reduce(job.control_bytes, cluster) + cluster.launch_seconds
    contention = cluster.contention_seconds
    found = [BucketTransfer(0.0, control, contention=contention)] if job.control_bytes else []
    for bucket in job.buckets:
        what = sent(bucket, strategy, config, job.element_bytes)
        first, again = seconds(what, cluster)
        size = handled(what.reduced, what.gathered, cluster.ranks)
        busy = size * cluster.busy_seconds_per_byte
        busy_again = handled(what.reduced_again, 0.0, cluster.ranks) * cluster.busy_seconds_per_byte
        found.append(
            BucketTransfer(
                ready=bucket.ready * backward,
                seconds=cluster.launch_seconds + max(first, busy),
                busy=busy,
                after=cost.after * bucket.elements / job.parameters,
                again=cluster.launch_seconds + max(again, busy_again) if again else 0.0,
                contention=contention,
            )
        )
    return found


def _sent_bytes(job: JobProfile, strategy: str, config: ExchangeConfig) -> float:
    return sum(sent(b, strategy, config, job.element_bytes).bytes for b in job.buckets)


def _limit(job: JobProfile, cluster: Cluster, strategy: str, config: ExchangeConfig) -> str:
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
            cluster, between=short[0], within=short[1], launch_seconds=0.0, contention_seconds=0.0
        ),
    }
    gains = {n: now - _exposed(job, c, strategy, config) for n, c in faster.items()}
    best = max(gains, key=lambda name: gains[name])
    return best if gains[best] > _NEGLIGIBLE * step else "compute"


def _exposed(job: JobProfile, cluster: Cluster, strategy: str, config: ExchangeConfig) -> float:
    backward = job.backward_seconds + job.costs[strategy].before
    return overlap(_transfers(job, cluster, strategy, config), backward).exposed
