"""Which ranks exchange with each other: one immutable object, the only truth about sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hvdtrain.runtime.grid import DATA, Grid
from hvdtrain.runtime.topology import Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Group:
    """Ranks that reduce with each other, seen from one of them.

    Args:
        rank: this process among them, 0 <= rank < size
        size: how many they are
    """

    rank: int
    size: int


ALONE = Group(rank=0, size=1)


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands on each axis of a job.

    Args:
        topology: all ranks, and their hosts.
        grid: which of them hold which part of the model.
        model: torch's axes inside of this rank's replica, those of more than one rank, by name;
            None: the rank holds the whole model.
    """

    topology: Topology
    grid: Grid
    model: DeviceMesh | None = None

    @classmethod
    def replicated(cls, topology: Topology) -> Mesh:
        """Every rank holds the whole model: the data axis has all ranks."""
        return cls(topology, Grid(tuple(range(topology.world_size)), {}))

    @property
    def world(self) -> Group:
        """All ranks."""
        return Group(self.topology.rank, self.topology.world_size)

    @cached_property
    def data(self) -> Group:
        """The replicas of this rank's part of the model; Horovod reduces over it."""
        return Group(self.coordinates[DATA], self.grid.replicas)

    @cached_property
    def shard(self) -> Group:
        """Ranks of this replica that hold a part of each parameter, and have own micro-batches."""
        return Group(self.coordinates.get("shard", 0), self.grid.degrees.get("shard", 1))

    @property
    def batch(self) -> Group:
        """Those among whom the micro-batches of a step are dealt."""
        return Group(self.data.rank * self.shard.size + self.shard.rank,
                     self.data.size * self.shard.size)  # fmt: skip

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """This rank's place on each axis."""
        return self.grid.coordinates(self.topology.rank)

    @cached_property
    def leads(self) -> bool:
        """This rank is the first of those that work on the same micro-batches."""
        return not any(at for axis, at in self.coordinates.items() if axis not in (DATA, "shard"))

    @cached_property
    def weighs(self) -> bool:
        """It is the first of those that share a sequence: what it gives has the whole weight."""
        return self.coordinates.get("context", 0) == 0

    @cached_property
    def counts(self) -> bool:
        """What its forward passes give is added up; another rank of `tensor` gives the same."""
        return self.coordinates.get("tensor", 0) == 0
