"""Which rank holds which part of an optimizer's state: a pure function of sizes and hosts.

The trained parameters, one after the other and flat, are cut into as many equal parts as there are
ranks; each part is held by several of them (ZeRO-1, arXiv:1910.02054, with copies).
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
    """The parts, and who holds them.

    Args:
        parts: the slices of each part, in the order of the parameters.
        holders: the ranks that hold each part; the first one gives it to others.
    """

    parts: tuple[tuple[Slice, ...], ...]
    holders: tuple[tuple[int, ...], ...]

    def held(self, rank: int) -> list[Slice]:
        """What a rank holds, part by part."""
        return [s for number in self.parts_of(rank) for s in self.parts[number]]

    def parts_of(self, rank: int) -> list[int]:
        """The numbers of the parts that a rank holds; that of which it is the first comes first."""
        return [
            number
            for first in (True, False)
            for number, ranks in enumerate(self.holders)
            if rank in ranks and (ranks[0] == rank) is first
        ]


def deal(sizes: Sequence[int], hosts: Sequence[str], copies: int) -> Dealing:
    """Parts of equal size, to within an element.

    Args:
        sizes: elements of each parameter.
        hosts: host of each rank.
        copies: ranks that hold each part; all of them where there are fewer.
    """
    ring = _ring(hosts, copies)
    ranks = len(hosts)
    holders = [
        tuple(ring[(number + copy) % ranks] for copy in range(min(copies, ranks)))
        for number in range(ranks)
    ]
    # The part that a rank gives has its number: gathered in the order of the ranks, they are whole.
    by_first = sorted(holders)
    return Dealing(tuple(cut(sizes, ranks)), tuple(by_first))


def cut(sizes: Sequence[int], parts: int) -> list[tuple[Slice, ...]]:
    """Cuts parameters that lie one after the other into equal parts.

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
    """The ranks in an order in which `copies` neighbours are on different hosts, if that can be.

    Ranks of one host are put `copies` places apart, those of the host with the most first; it can
    be where no host has more than one in `copies` of the ranks.
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
    """The hosts with whose loss a part would be lost."""
    only = ({hosts[rank] for rank in ranks} for ranks in dealing.holders)
    return sorted({host for those in only if len(those) == 1 for host in those})
