"""Assignment of an optimizer's state to ranks, in shards: a pure function of sizes and hosts.

The trained parameters, flattened and concatenated, are cut into as many equal shards as there are
ranks; each shard is held by several ranks (ZeRO-1, arXiv:1910.02054, with copies).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple


class Slice(NamedTuple):
    """Elements of one parameter, in C order.

    Args:
        number: of the parameter, in the optimizer's order.
        start: its first element.
        stop: one beyond its last.
    """

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class Dealing:
    """The shards, and the ranks that hold them.

    Args:
        parts: the slices of each shard, in the order of the parameters.
        holders: the ranks that hold each shard; the first one sends it to others.
    """

    parts: tuple[tuple[Slice, ...], ...]
    holders: tuple[tuple[int, ...], ...]

    def held(self, rank: int) -> list[Slice]:
        """The slices that a rank holds, shard by shard."""
        return [s for number in self.parts_of(rank) for s in self.parts[number]]

    def parts_of(self, rank: int) -> list[int]:
        """Numbers of the shards that a rank holds; the shard that it holds first comes first."""
        return [
            number
            for first in (True, False)
            for number, ranks in enumerate(self.holders)
            if rank in ranks and (ranks[0] == rank) is first
        ]


def deal(sizes: Sequence[int], hosts: Sequence[str], copies: int) -> Dealing:
    """Assign shards of equal size, to within one element.

    Args:
        sizes: elements of each parameter.
        hosts: host of each rank.
        copies: ranks that hold each shard; all ranks if there are fewer.
    """
    ring = _ring(hosts, copies)
    ranks = len(hosts)
    holders = [
        tuple(ring[(number + copy) % ranks] for copy in range(min(copies, ranks)))
        for number in range(ranks)
    ]
    # Rank r sends shard r: gathered in the order of the ranks, the shards are the whole.
    by_first = sorted(holders)
    return Dealing(tuple(cut(sizes, ranks)), tuple(by_first))


def cut(sizes: Sequence[int], parts: int) -> list[tuple[Slice, ...]]:
    """Cut concatenated parameters into equal shards.

    Args:
        sizes: elements of each.
    """
    ends = [*accumulate(sizes)]
    total = ends[-1] if ends else 0
    bounds = [total * number // parts for number in range(parts + 1)]
    found = []
    for first, last in pairwise(bounds):
        slices = []
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            start, stop = max(first - (end - size), 0), min(last - (end - size), size)
            if start < stop:
                slices.append(Slice(number, start, stop))
        found.append(tuple(slices))
    return found


def _ring(hosts: Sequence[str], copies: int) -> list[int]:
    """Order the ranks so that `copies` neighbors are on different hosts, if possible.

    Ranks of one host are placed `copies` places apart, starting with the host that has the most
    ranks; it is possible if no host has more than one in `copies` of the ranks.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    ranks = [rank for own in sorted(by_host.values(), key=len, reverse=True) for rank in own]
    size = len(ranks)
    places = [place for first in range(copies) for place in range(first, size, copies)]
    ring = [0] * size
    for place, rank in zip(places, ranks, strict=True):
        ring[place] = rank
    return ring


def hosts_that_hold_alone(dealing: Dealing, hosts: Sequence[str]) -> list[str]:
    """The hosts whose loss would lose a shard."""
    only = ({hosts[rank] for rank in ranks} for ranks in dealing.holders)
    return sorted({host for those in only if len(those) == 1 for host in those})
