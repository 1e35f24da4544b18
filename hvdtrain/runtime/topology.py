"""Ranks of a generation and their hosts: one immutable object."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The ranks of a run and their hosts.

    Args:
        rank: of this process, 0 <= rank < world_size
        world_size: number of processes
        local_rank: of this process among the processes on its host
        local_size: number of processes on its host
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
        """Return host name -> its ranks, in rank order."""
        ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            ranks.setdefault(host, []).append(rank)
        return ranks

    def describe(self) -> str:
        """Return a description such as "16 ranks (node1:8, node2:8)"."""
        where = ", ".join(f"{host}:{len(ranks)}" for host, ranks in self.ranks_by_host().items())
        return f"{self.world_size} rank{'s' if self.world_size > 1 else ''} ({where})"
