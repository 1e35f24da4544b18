"""The cluster of a plan: hosts, ranks and their links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

from hvdtrain.errors import UserError, require

# TCP payload with time stamps / bytes of a full Ethernet frame with preamble and gap.
TCP_PAYLOAD = 1448 / 1538

Algorithm = Literal["ring", "hierarchical", "best"]

_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Link:
    """A full-duplex link between two ranks.

    Args:
        bits_per_second: in each direction.
        latency: seconds from sending a short message to its arrival.
        payload: fraction of the bits that carry message data.
    """

    bits_per_second: float
    latency: float = 0.0
    payload: float = 1.0

    def __post_init__(self) -> None:
        require(self.bits_per_second > 0, f"a bandwidth must be > 0, not {self.bits_per_second}")
        require(self.latency >= 0, f"a latency must be >= 0 s, not {self.latency}")
        require(0 < self.payload <= 1, f"a payload must lie in (0, 1], not {self.payload}")

    @property
    def bytes_per_second(self) -> float:
        return self.bits_per_second * self.payload / 8


@dataclass(frozen=True)
class Cluster:
    """Identical hosts with the same number of ranks.

    Args:
        hosts, ranks_per_host: number of hosts, and of ranks on each.
        between: a host's link to the other hosts, shared by its ranks.
        within: link between two ranks of a host.
        algorithm: all-reduce algorithm: a `ring` through all ranks (Horovod on Gloo),
            `hierarchical` (`exchange.hierarchical`), or the `best` for its size (NCCL, MPI).
        launch_seconds: from the request of a collective on all ranks to its first message:
            Horovod's negotiation.
        busy_seconds_per_byte: time of a rank's own processor for each byte that it sends; 0 if a
            separate device computes.
        contention_seconds: extra delay of a collective while the ranks compute, on processors for
            which its threads have to wait.
    """

    hosts: int
    ranks_per_host: int
    between: Link
    within: Link
    algorithm: Algorithm = "ring"
    launch_seconds: float = 0.0
    busy_seconds_per_byte: float = 0.0
    contention_seconds: float = 0.0

    def __post_init__(self) -> None:
        require(self.hosts >= 1, f"a cluster has at least 1 host, not {self.hosts}")
        require(self.ranks_per_host >= 1, f"a host has at least 1 rank, not {self.ranks_per_host}")

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


def parse_bandwidth(text: str) -> float:
    """Parse `25gbit`, `400Mbit/s` or `100G` into bits per second; a capital B is bytes: `900GB/s`.

    Raises:
        UserError: the text is not a bandwidth.
    """
    pattern = r"([\d.]+(?:e\d+)?)\s*([kmgt]?)(bit|bps|b|)(?:/s)?"
    match = re.fullmatch(pattern, text.strip(), re.IGNORECASE)
    value = _number(match[1]) * _BITS[match[2].lower()] if match else 0.0
    if not match or value <= 0:
        raise UserError(
            f"{text} is not a bandwidth: give bits per second, such as 25gbit, or bytes, such as "
            "3GB/s"
        )
    counts_bytes = match[3].startswith("B") and match[3].lower() != "bit"
    return value * 8 if counts_bytes else value


def parse_seconds(text: str) -> float:
    """Parse `20us`, `0.5ms` or `1s` into seconds.

    Raises:
        UserError: the text is not a time.
    """
    match = re.fullmatch(r"([\d.]+)\s*(s|ms|us|ns)", text.strip().lower())
    value = _number(match[1]) * _SECONDS[match[2]] if match else -1.0
    if value < 0:
        raise UserError(f"{text} is not a time: give a number with ns, us, ms or s, such as 20us")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


# --- seconds of collectives by the alpha-beta model --------------------------
# Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH"
# (2005). The hierarchical all-reduce is Horovod's. The tree is NCCL's pair of binary trees
# (Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
# scan", 2009). Additions are not included here, see Cluster.busy_seconds_per_byte.


def all_reduce(size: float, cluster: Cluster) -> float:
    """Seconds until every rank has the sum over all ranks.

    Args:
        size: buffer size of each rank in bytes.
    """
    if cluster.algorithm == "ring":
        return ring(size, cluster)
    if cluster.algorithm == "hierarchical":
        return hierarchical(size, cluster)
    return min(ring(size, cluster), tree(size, cluster), recursive_doubling(size, cluster))


def ring(size: float, cluster: Cluster) -> float:
    """A ring through all ranks, host by host: each link carries 2 (n - 1) / n of the buffer."""
    n = cluster.ranks
    return 2 * (n - 1) * _step(size / n, cluster)


def recursive_doubling(size: float, cluster: Cluster) -> float:
    """Exchange of whole buffers between ranks at doubling distances; for short messages.

    Between hosts, all ranks of a host send at the same time over one link.
    """
    inside = _rounds(cluster.ranks_per_host) * _message(size, cluster.within)
    at_once = size * cluster.ranks_per_host
    return inside + _rounds(cluster.hosts) * _message(at_once, cluster.between)


def tree(size: float, cluster: Cluster) -> float:
    """Two binary trees over the hosts, up and down, each with half of the buffer.

    Within a host the ranks form a chain. Chunks are pipelined, so bytes count once per direction.
    """
    if cluster.ranks == 1:
        return 0.0
    hops = 2 * _rounds(cluster.hosts) * cluster.between.latency
    hops += 2 * (cluster.ranks_per_host - 1) * cluster.within.latency
    return hops + 2 * size / _slowest(cluster)


def hierarchical(size: float, cluster: Cluster) -> float:
    """Reduce-scatter within a host, a ring per slice between hosts, all-gather within a host.

    The slices of a host's ranks share its link.
    """
    r, h = cluster.ranks_per_host, cluster.hosts
    inside = 2 * (r - 1) * _message(size / r, cluster.within)
    return inside + 2 * (h - 1) * _message(size / h, cluster.between)


def all_gather(size: float, cluster: Cluster) -> float:
    """Seconds until every rank has the buffers of all ranks, by a ring.

    Args:
        size: buffer size of one rank in bytes.
    """
    return (cluster.ranks - 1) * _step(size, cluster)


def reduce_scatter(size: float, cluster: Cluster) -> float:
    """Seconds until every rank has its shard of the sum over all ranks, by a ring.

    Args:
        size: size of each rank's whole buffer in bytes.
    """
    return (cluster.ranks - 1) * _step(size / cluster.ranks, cluster)


def _step(size: float, cluster: Cluster) -> float:
    """Seconds in which all ranks of a ring, host by host, send `size` bytes to the next rank.

    The slowest edge determines the time for the bytes. Data passes the edges one after the other,
    so the mean of their latencies counts.
    """
    if cluster.ranks == 1:
        return 0.0
    crossing = cluster.hosts / cluster.ranks if cluster.hosts > 1 else 0.0
    latency = crossing * cluster.between.latency + (1 - crossing) * cluster.within.latency
    return latency + size / _slowest(cluster)


def _message(size: float, link: Link) -> float:
    return link.latency + size / link.bytes_per_second


def _slowest(cluster: Cluster) -> float:
    speeds = [cluster.between.bytes_per_second] if cluster.hosts > 1 else []
    if cluster.ranks_per_host > 1:
        speeds.append(cluster.within.bytes_per_second)
    return min(speeds)


def _rounds(number: int) -> int:
    return ceil(log2(number))
