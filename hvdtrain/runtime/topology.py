"""Who takes part: one immutable object."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The ranks of a run and where they are.

    Args:
        rank: this process, 0 <= rank < world_size
        world_size: all processes
        local_rank: this process among those of its host
        local_size: processes on its host
        hosts: host name of every rank
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    hosts: tuple[str, ...]

    @property
    def host(self) -> str:
        return self.hosts[self.rank]

    def ranks_by_host(self) -> dict[str, list[int]]:
        """Host name -> its ranks, in the order of the ranks."""
        ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            ranks.setdefault(host, []).append(rank)
        return ranks

    def describe(self) -> str:
        """Such as "16 ranks (node1:8, node2:8)"."""
        where = ", ".join(f"{host}:{len(ranks)}" for host, ranks in self.ranks_by_host().items())
        return f"{self.world_size} rank{'s' if self.world_size > 1 else ''} ({where})"
