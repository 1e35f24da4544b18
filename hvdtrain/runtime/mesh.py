"""Groups of ranks that exchange with each other: one immutable object, the only source of sizes."""

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
    """Ranks that reduce with each other, from the view of one rank.

    Args:
        rank: of this process in the group, 0 <= rank < size
        size: number of ranks
    """

    rank: int
    size: int


ALONE = Group(rank=0, size=1)


@dataclass(frozen=True)
class Mesh:
    """Position of this rank on each axis of a job.

    Args:
        topology: all ranks, and their hosts.
        grid: assignment of the model's shards to ranks.
        model: torch's mesh of this rank's replica, with the axes of more than one rank, by name;
            None: the rank holds the whole model.
    """

    topology: Topology
    grid: Grid
    model: DeviceMesh | None = None

    @classmethod
    def replicated(cls, topology: Topology) -> Mesh:
        """Return a mesh in which every rank holds the whole model: the data axis has all ranks."""
        return cls(topology, Grid(tuple(range(topology.world_size)), {}))

    @property
    def world(self) -> Group:
        """All ranks."""
        return Group(self.topology.rank, self.topology.world_size)

    @cached_property
    def data(self) -> Group:
        """The replicas of this rank's shard of the model; Horovod reduces over this group."""
        return Group(self.coordinates[DATA], self.grid.replicas)

    @cached_property
    def shard(self) -> Group:
        """Ranks of this replica that shard each parameter, and have micro-batches of their own."""
        return Group(self.coordinates.get("shard", 0), self.grid.degrees.get("shard", 1))

    @property
    def batch(self) -> Group:
        """Ranks to which the micro-batches of a step are assigned."""
        return Group(self.data.rank * self.shard.size + self.shard.rank,
                     self.data.size * self.shard.size)  # fmt: skip

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """This rank's position on each axis."""
        return self.grid.coordinates(self.topology.rank)

    @cached_property
    def leads(self) -> bool:
        """Whether this rank is the first of the ranks that work on the same micro-batches."""
        return not any(at for axis, at in self.coordinates.items() if axis not in (DATA, "shard"))

    @cached_property
    def weighs(self) -> bool:
        """Whether this rank is first of those that share a sequence: only its weights count."""
        return self.coordinates.get("context", 0) == 0

    @cached_property
    def counts(self) -> bool:
        """Whether results of this rank's forward passes are summed; `tensor` peers repeat them."""
        return self.coordinates.get("tensor", 0) == 0
