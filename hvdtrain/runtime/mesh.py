"""Which ranks exchange with each other: one immutable object, the only truth about sizes."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.runtime.topology import Topology


@dataclass(frozen=True)
class Group:
    """Ranks that reduce with each other, seen from one of them.

    Args:
        rank: this process among them, 0 <= rank < size
        size: how many they are
    """

    rank: int
    size: int


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands on each axis of a job.

    Args:
        topology: all ranks, and their hosts.
        data: the replicas of this rank's part of the model; Horovod reduces over it.
    """

    topology: Topology
    data: Group

    @classmethod
    def replicated(cls, topology: Topology) -> Mesh:
        """Every rank holds the whole model: the data axis has all ranks."""
        return cls(topology, Group(topology.rank, topology.world_size))
