"""Seconds of collectives by the alpha-beta model: a latency per message, and the time per byte.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH"
(2005). The hierarchical all-reduce is Horovod's. The tree is NCCL's pair of binary trees
(Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", 2009). Additions are not included here, see Cluster.busy_seconds_per_byte.
"""

from __future__ import annotations

from math import ceil, log2

from hvdtrain.plan.cluster import Cluster, Link


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
