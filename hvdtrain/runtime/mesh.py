"""Positions of the ranks: immutable objects, and the only source of sizes.

Topology: ranks and their hosts. Grid: assignment of the model's shards to ranks. Mesh: the groups
of ranks to which one rank belongs. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from hvdtrain.errors import UserError
from hvdtrain.text import plural

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Topology:
    """The ranks of a run and their hosts.

    Args:
        rank: rank of this process, 0 <= rank < world_size
        world_size: number of processes
        local_rank: number of this process among the processes on its host
        local_size: number of processes on its host
        hosts: host name of every rank
        gpus: identity of every rank's GPU, see runtime.device.gpu_of; "": none, or not yet known
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    hosts: tuple[str, ...]
    gpus: tuple[str, ...] = ()

    @property
    def host(self) -> str:
        return self.hosts[self.rank]

    def ranks_by_host(self) -> dict[str, list[int]]:
        """Return host name -> its ranks, in rank order."""
        ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            ranks.setdefault(host, []).append(rank)
        return ranks

    def describe(self) -> str:
        """Return a description such as "16 ranks (node1:8, node2:8)"."""
        where = ", ".join(f"{host}:{len(ranks)}" for host, ranks in self.ranks_by_host().items())
        return f"{plural(self.world_size, 'rank')} ({where})"


DATA = "data"
# Axes along which a rank waits for the other ranks of its replica.
WAITED = ("pipeline", "context", "tensor", "shard")
# Labels of the axes in a rank's exporter.
LABELS = {DATA: "dp", "pipeline": "pp", "shard": "fsdp", "context": "cp", "tensor": "tp"}


@dataclass(frozen=True)
class Grid:
    """The ranks of a job, by replica of the model.

    Args:
        ranks: ranks of all replicas; ranks of a replica are consecutive, with the last axis
            fastest.
        degrees: ranks along each axis of a replica, outermost first.
    """

    ranks: tuple[int, ...]
    degrees: Mapping[str, int]

    @classmethod
    def of(
        cls,
        hosts: Sequence[str],
        degrees: Mapping[str, int],
        place: Sequence[str],
        before: Sequence[int | None] = (),
        holders: Sequence[int] = (),
    ) -> Grid:
        """Return the grid whose neighbors share a host, as far as a host has enough ranks.

        Args:
            hosts: host of each rank.
            degrees: degrees of each axis of a replica.
            place: the axes; the first one has priority to stay inside a host.
            before: index of each rank's previous shard, as in `shard`, or None. A rank keeps its
                index unless too many ranks have it; this has priority over neighbors on a host.
            holders: ranks that hold a shard that the run needs: they have priority to keep it.

        Raises:
            UserError: the ranks do not form a whole number of replicas.
        """
        size = prod(degrees.values())
        if len(hosts) % size:
            raise UserError(_does_not_divide(len(hosts), size, degrees))
        by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        ranks = [rank for ranks in by_host.values() for rank in ranks]
        if any(shard is not None for shard in before):
            ranks = _keeping(ranks, hosts, before, holders, size)
        return cls((*ranks,), {axis: degrees[axis] for axis in reversed([*place])})

    @classmethod
    def at(cls, coordinates: Sequence[Mapping[str, int]]) -> Grid:
        """Return the grid in which each rank has these `coordinates`, in their order of axes."""
        order = sorted(range(len(coordinates)), key=lambda rank: (*coordinates[rank].values(),))
        axes = [axis for axis in coordinates[0] if axis != DATA]
        return cls(tuple(order), {axis: 1 + max(at[axis] for at in coordinates) for axis in axes})

    @property
    def replica_size(self) -> int:
        """Number of ranks in a replica."""
        return prod(self.degrees.values())

    @property
    def replicas(self) -> int:
        return len(self.ranks) // self.replica_size

    def replica_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's replica, in the order of the grid."""
        size = self.replica_size
        start = self.ranks.index(rank) // size * size
        return self.ranks[start : start + size]

    def shard(self, rank: int) -> int:
        """Return the index of a rank's shard of the model: its position in its replica."""
        return self.ranks.index(rank) % self.replica_size

    def same_shard(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same shard of the model, one in each replica."""
        return self.ranks[self.shard(rank) :: self.replica_size]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's position on each axis, the data axis first."""
        replica, left = divmod(self.ranks.index(rank), self.replica_size)
        found = {}
        for axis, degree in reversed([*self.degrees.items()]):
            left, found[axis] = divmod(left, degree)
        return {DATA: replica, **dict(reversed(found.items()))}

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return all ranks, grouped by their positions on `axes`."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in self.ranks:
            at = self.coordinates(rank)
            found.setdefault(tuple(at.get(axis, 0) for axis in axes), []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    @property
    def stages(self) -> list[tuple[int, ...]]:
        """Groups of ranks that do the same work: the ranks of each pipeline stage, else all."""
        return self.groups("pipeline")

    @property
    def in_step(self) -> list[tuple[int, ...]]:
        """Groups of ranks that wait for each other within a pass: of one stage of one replica."""
        return self.groups(DATA, "pipeline")

    @property
    def with_same_parameters(self) -> list[tuple[int, ...]]:
        """Groups of ranks that hold the same parameters, including ranks that share sequences."""
        return self.groups("pipeline", "shard", "tensor")

    def describe(self, hosts: Sequence[str]) -> str:
        """Return a line for each host of each replica: its ranks and their coordinates."""
        axes = "".join(f" x {axis} {degree}" for axis, degree in self.degrees.items() if degree > 1)
        lines = [f"{plural(len(self.ranks), 'rank')} = data {self.replicas}{axes}"]
        for replica in range(self.replicas):
            start = replica * self.replica_size
            ranks = self.ranks[start : start + self.replica_size]
            for host in dict.fromkeys(hosts[rank] for rank in ranks):
                own = ", ".join(self._describe(rank) for rank in ranks if hosts[rank] == host)
                lines.append(f"replica {replica} on {host}: {own}")
        return "\n".join(lines)

    def _describe(self, rank: int) -> str:
        at = self.coordinates(rank)
        used = [f"{axis} {at[axis]}" for axis, degree in self.degrees.items() if degree > 1]
        return f"rank {rank}" + (f" ({', '.join(used)})" if used else "")


def _keeping(
    ranks: Sequence[int],
    hosts: Sequence[str],
    before: Sequence[int | None],
    holders: Sequence[int],
    size: int,
) -> list[int]:
    """Return `ranks`, given host by host, in an order in which they keep their shard indices."""
    replicas = len(ranks) // size
    of_shard: list[list[int]] = [[] for _ in range(size)]
    free = []
    for rank in sorted(ranks, key=lambda rank: rank not in holders):
        shard = before[rank]
        if shard is None or len(of_shard[shard]) == replicas:
            free.append(rank)
        else:
            of_shard[shard].append(rank)
    for rank in free:  # to the shard with the fewest copies on its host
        there = [
            (sum(hosts[other] == hosts[rank] for other in own), shard)
            for shard, own in enumerate(of_shard)
            if len(own) < replicas
        ]
        of_shard[min(there)[1]].append(rank)
    found: list[int] = []
    for first in sorted(of_shard[0], key=ranks.index):
        found.append(first)
        for own in of_shard[1:]:
            own.sort(key=lambda rank: (hosts[rank] != hosts[first], ranks.index(rank)))
            found.append(own.pop(0))
    return found


def key_of_degree(axis: str) -> str:
    """Return the configuration key of the degree of an axis."""
    return "parallel.shard.degree" if axis == "shard" else f"parallel.{axis}"


def _does_not_divide(ranks: int, size: int, degrees: Mapping[str, int]) -> str:
    named = {key_of_degree(axis): degree for axis, degree in degrees.items() if degree > 1}
    keys = " x ".join(f"{key} {degree}" for key, degree in named.items())
    below = ranks // size * size
    near = " or ".join(str(count) for count in (below, below + size) if count)
    return (
        f"{ranks} rank{'s' if ranks > 1 else ''} cannot be divided into replicas of {size} "
        f"({keys}): start {near} ranks, or change the degrees"
    )


@dataclass(frozen=True)
class Group:
    """Ranks that reduce with each other, from the view of one rank.

    Args:
        rank: rank of this process in the group, 0 <= rank < size
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
    def axes(self) -> DeviceMesh:
        """Torch's mesh of this rank's replica; only for a model that spans ranks."""
        assert self.model is not None
        return self.model

    def ranks_along(self, axis: str) -> ProcessGroup | None:
        """Return the ranks of this replica along an axis; None: this rank alone."""
        alone = self.model is None or self.grid.degrees.get(axis, 1) == 1
        return None if alone else self.axes.get_group(axis)

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
