"""Which rank holds which part of the model: arithmetic on ranks alone, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from hvdtrain.errors import UserError

DATA = "data"
# Axes along which a rank waits for the others of its replica.
WAITED = ("pipeline", "context", "tensor", "shard")
# Of the axes, as labels of a rank's exporter.
LABELS = {DATA: "dp", "pipeline": "pp", "shard": "sp", "context": "cp", "tensor": "tp"}


@dataclass(frozen=True)
class Grid:
    """The ranks of a job, replica of the model after replica.

    Args:
        ranks: of all replicas; those of one follow each other, the last axis fastest.
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
        """The grid in which neighbours are on one host, as far as there are enough ranks.

        Args:
            hosts: of each rank.
            degrees: of each axis of a replica.
            place: these, the one that is to stay inside a host first.
            before: the part that each rank had before, as `part` numbers them, or None. It gets
                the same one, unless too many have it; neighbours are then where they can be.
            holders: ranks that hold what the run needs of their parts: they keep them first.

        Raises:
            UserError: the ranks are not a whole number of replicas.
        """
        size = prod(degrees.values())
        if len(hosts) % size:
            raise UserError(_does_not_divide(len(hosts), size, degrees))
        by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        ranks = [rank for ranks in by_host.values() for rank in ranks]
        if any(part is not None for part in before):
            ranks = _keeping(ranks, hosts, before, holders, size)
        return cls((*ranks,), {axis: degrees[axis] for axis in reversed([*place])})

    @classmethod
    def at(cls, coordinates: Sequence[Mapping[str, int]]) -> Grid:
        """The grid in which each rank has these `coordinates`, axes in their order."""
        order = sorted(range(len(coordinates)), key=lambda rank: (*coordinates[rank].values(),))
        axes = [axis for axis in coordinates[0] if axis != DATA]
        return cls(tuple(order), {axis: 1 + max(at[axis] for at in coordinates) for axis in axes})

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return prod(self.degrees.values())

    @property
    def replicas(self) -> int:
        return len(self.ranks) // self.replica_size

    def replica_of(self, rank: int) -> tuple[int, ...]:
        """The ranks of its replica, in the order of the grid."""
        size = self.replica_size
        start = self.ranks.index(rank) // size * size
        return self.ranks[start : start + size]

    def part(self, rank: int) -> int:
        """The number of the part of the model that it holds: its place in its replica."""
        return self.ranks.index(rank) % self.replica_size

    def same_part(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same part of the model, one in each replica."""
        return self.ranks[self.part(rank) :: self.replica_size]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Its place on each axis, the data axis first."""
        replica, left = divmod(self.ranks.index(rank), self.replica_size)
        found = {}
        for axis, degree in reversed([*self.degrees.items()]):
            left, found[axis] = divmod(left, degree)
        return {DATA: replica, **dict(reversed(found.items()))}

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All ranks, divided into those that stand at the same place on each of `axes`."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in self.ranks:
            at = self.coordinates(rank)
            found.setdefault(tuple(at.get(axis, 0) for axis in axes), []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    @property
    def stages(self) -> list[tuple[int, ...]]:
        """The ranks that do the same work: those of each stage of a pipeline, else all."""
        return self.groups("pipeline")

    @property
    def in_step(self) -> list[tuple[int, ...]]:
        """The ranks that wait for each other inside of their passes: of a stage of a replica."""
        return self.groups(DATA, "pipeline")

    @property
    def holders(self) -> list[tuple[int, ...]]:
        """The ranks that hold the same part of the model; those who share sequences do."""
        return self.groups("pipeline", "shard", "tensor")

    def describe(self, hosts: Sequence[str]) -> str:
        """A line for each host of a replica: its ranks, and what they hold of the model."""
        axes = "".join(f" x {axis} {degree}" for axis, degree in self.degrees.items() if degree > 1)
        lines = [f"{len(self.ranks)} ranks = data {self.replicas}{axes}"]
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
    """`ranks`, host by host, in an order in which they keep their parts."""
    replicas = len(ranks) // size
    of_part: list[list[int]] = [[] for _ in range(size)]
    free = []
    for rank in sorted(ranks, key=lambda rank: rank not in holders):
        part = before[rank]
        if part is None or len(of_part[part]) == replicas:
            free.append(rank)
        else:
            of_part[part].append(rank)
    for rank in free:  # to the part that its host has least of
        there = [
            (sum(hosts[other] == hosts[rank] for other in own), part)
            for part, own in enumerate(of_part)
            if len(own) < replicas
        ]
        of_part[min(there)[1]].append(rank)
    found: list[int] = []
    for first in sorted(of_part[0], key=ranks.index):
        found.append(first)
        for own in of_part[1:]:
            own.sort(key=lambda rank: (hosts[rank] != hosts[first], ranks.index(rank)))
            found.append(own.pop(0))
    return found


def _does_not_divide(ranks: int, size: int, degrees: Mapping[str, int]) -> str:
    keys = " x ".join(f"parallel.{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
    below = ranks // size * size
    near = " or ".join(str(count) for count in (below, below + size) if count)
    return (
        f"{ranks} rank{'s' if ranks > 1 else ''} cannot be divided into replicas of {size} "
        f"({keys}): start {near} ranks, or change the degrees"
    )
