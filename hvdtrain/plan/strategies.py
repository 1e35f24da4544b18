"""Bytes that each gradient exchange strategy sends for a bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.plan.cluster import Cluster
from hvdtrain.plan.collectives import all_gather, all_reduce
from hvdtrain.plan.job import Bucket

# Name -> keys of `exchange`.
STRATEGIES: Mapping[str, Mapping[str, str]] = {
    "dense": {},
    "float16": {"wire": "float16"},
    "bfloat16": {"wire": "bfloat16"},
    "topk": {"compression": "topk"},
    "powersgd": {"compression": "powersgd"},
}
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


def sent(bucket: Bucket, strategy: str, config: ExchangeConfig, element_bytes: int = 4) -> Sent:
    """Bytes that `strategy` sends for a bucket.

    Args:
        config: provides the rank of powersgd and the ratio of topk.
        element_bytes: of an uncompressed gradient.

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


def _powersgd(bucket: Bucket, rank: int, element_bytes: int) -> Sent:
    if bucket.matrices is None:
        raise ValueError("powersgd: the shapes of the parameters are not known")
    thin = [(r, c) for r, c in bucket.matrices if (r + c) * rank < r * c]
    whole = bucket.elements - sum(r * c for r, c in thin)
    ps, qs = sum(r for r, _ in thin) * rank, sum(c for _, c in thin) * rank
    if not thin:
        return Sent(reduced=bucket.elements * element_bytes)
    return Sent(reduced=(ps + whole) * element_bytes, reduced_again=qs * element_bytes)
