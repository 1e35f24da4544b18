"""Which ranks hold which shards, and which transfers turn one assignment into another.

Everything here is a pure function. A ShardMap follows from sizes, hosts and ranks alone. A plan of
transfers also needs the ranks' current holdings, gathered by the caller. All ranks then compute the
same result. Two layouts use it:

- The state of a sharded optimizer (zero.py, ZeRO-1, arXiv:1910.02054). The trained parameters,
  flattened and concatenated, are cut into as many equal shards as there are ranks, and each shard
  is held by `parallel.shard.copies` ranks. Any number of ranks can continue: the parameters are cut
  again.
- A model that spans ranks (spanned.py). A replica has a fixed number of shards, each of which is
  sent as a unit. To share the code, shard n is written as the placeholder Interval(0, n, n + 1),
  which says nothing about the shard's elements: with 2 shards per replica, Interval(0, 1, 2) is all
  of shard 1, not element 1 of tensor 0. Each replica holds all shards.

After a change of ranks, `plan_transfers` compares what the ranks hold with what the new ShardMap
assigns to them. Generation calls it through zero_state.redistribute, and Spanning.regroup calls it;
zero_state.py and spanned.py then send the elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from hvdtrain.runtime.mesh import Grid


class ShardLostError(Exception):
    """No surviving rank holds a required shard; raised on all ranks.

    The run returns to its newest checkpoint.
    """


class Interval(NamedTuple):
    """Consecutive elements of one tensor, in C order.

    Args:
        tensor: index of the tensor; in a sharded optimizer, of the parameter.
        start: the first element.
        stop: one beyond the last element.
    """

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class ShardMap:
    """The shards, and the ranks that hold them.

    Args:
        shards: the intervals of each shard, in the order of the tensors.
        holders: the ranks that hold each shard. The first holder writes an optimizer shard to
            checkpoints; for models that span ranks see spanned.Saves.
    """

    shards: tuple[tuple[Interval, ...], ...] = ()
    holders: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def even(cls, sizes: Sequence[int], hosts: Sequence[str], copies: int) -> ShardMap:
        """Cut concatenated tensors into one shard per rank, equal to within one element.

        Rank r is the first holder of shard r.

        Args:
            sizes: elements of each tensor.
            hosts: host of each rank.
            copies: number of ranks that hold each shard, on different hosts if possible; all ranks
                if `copies` exceeds their number.
        """
        ring = _ring(hosts)
        ranks = len(hosts)
        holders = [
            tuple(ring[(place + copy) % ranks] for copy in range(min(copies, ranks)))
            for place in range(ranks)
        ]
        by_first_holder = sorted(holders)  # the first holder of shard r is rank r
        return cls(tuple(_cut(sizes, ranks)), tuple(by_first_holder))

    @classmethod
    def of_replicas(cls, grid: Grid) -> ShardMap:
        """Return the map of a model that spans ranks: one holder of each shard per replica."""
        shards = range(grid.replica_size)
        return cls(
            tuple((*placeholder(shard),) for shard in shards),
            tuple(grid.ranks[shard :: grid.replica_size] for shard in shards),
        )

    def held_by(self, rank: int) -> list[Interval]:
        """Return the intervals that a rank holds, shard by shard."""
        return [interval for shard in self.shards_of(rank) for interval in self.shards[shard]]

    def shards_of(self, rank: int) -> list[int]:
        """Return a rank's shards, beginning with the shard of which it is the first holder."""
        own = [shard for shard, ranks in enumerate(self.holders) if rank in ranks[:1]]
        copies = [shard for shard, ranks in enumerate(self.holders) if rank in ranks[1:]]
        return own + copies

    def sole_hosts(self, hosts: Sequence[str]) -> list[str]:
        """Return the hosts whose loss would lose a shard.

        Args:
            hosts: host of each rank.
        """
        hosts_of_shards = ({hosts[rank] for rank in ranks} for ranks in self.holders)
        return sorted({host for own in hosts_of_shards if len(own) == 1 for host in own})


def placeholder(shard: int | None) -> list[Interval]:
    """Return the interval that stands for a shard of a model that spans ranks; none for None."""
    return [] if shard is None else [Interval(0, shard, shard + 1)]


def _cut(sizes: Sequence[int], shards: int) -> list[tuple[Interval, ...]]:
    ends = [*accumulate(sizes)]
    total = ends[-1] if ends else 0
    bounds = [total * shard // shards for shard in range(shards + 1)]
    found = []
    for first, last in pairwise(bounds):
        intervals = []
        for tensor, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            start, stop = max(first - (end - size), 0), min(last - (end - size), size)
            if start < stop:
                intervals.append(Interval(tensor, start, stop))
        found.append(tuple(intervals))
    return found


def _ring(hosts: Sequence[str]) -> list[int]:
    """Order the ranks in a ring in which neighbors are on different hosts, as far as possible.

    If no host has more than 1/n of the ranks, any n consecutive ranks are on n hosts. The ring
    consists of rounds, as many as the largest host has ranks. Listed host by host, largest first,
    the ranks go to the rounds in turn, so each host has at most one rank in a round, at nearly the
    same place of each round; and a round has at least n ranks.

    For example, with ranks 0, 1 and 2 on host A and ranks 3 and 4 on host B there are 3 rounds:
    (0, 3), (1, 4) and (2), so the ring is 0, 3, 1, 4, 2. Its end, 2, and its beginning, 0, are
    both on host A, which has more than half of the ranks.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    groups = sorted(by_host.values(), key=len, reverse=True)
    ranks = [rank for group in groups for rank in group]
    rounds = len(groups[0])
    return [rank for first in range(rounds) for rank in ranks[first::rounds]]


class Transfer(NamedTuple):
    """Elements that one rank sends to the ranks that lack them (zero_state.py: to all ranks).

    Args:
        source: the lowest rank that holds them.
        interval: the elements.
        receivers: in ascending order.
    """

    source: int
    interval: Interval
    receivers: tuple[int, ...]

    def continues(self, other: Transfer) -> bool:
        """Whether this is a transfer between the same ranks, of the elements after `other`'s."""
        tensor, _, stop = other.interval
        same_ranks = (self.source, self.receivers) == (other.source, other.receivers)
        return same_ranks and self.interval[:2] == (tensor, stop)


def plan_transfers(
    held: Sequence[Sequence[Interval]], wanted: Sequence[Sequence[Interval]]
) -> list[Transfer]:
    """Plan the transfers that give every rank its elements; each missing element is sent once.

    Args:
        held: for each rank of the new generation, the intervals that it holds as of the most
            advanced step; none if it has just joined, or is behind.
        wanted: for each rank of the new generation, the intervals that it must hold.

    Returns:
        Transfers, ordered by source, then by interval; zero_state.py batches consecutive transfers
            of one source.

    Raises:
        ShardLostError: no rank holds some wanted elements.
    """
    held_ranges, wanted_ranges = _by_tensor(held), _by_tensor(wanted)
    transfers: list[Transfer] = []
    for tensor, wanted_of in wanted_ranges.items():
        held_of = held_ranges.get(tensor, [])
        edges = sorted({edge for _, *ends in (*held_of, *wanted_of) for edge in ends})
        # Between two neighboring edges, neither the holders nor the receivers change.
        for start, stop in pairwise(edges):
            holders = _ranks_with(held_of, start, stop)
            receivers = _ranks_with(wanted_of, start, stop) - holders
            if receivers and not holders:
                raise ShardLostError(f"elements {start} to {stop} of tensor {tensor}")
            if not receivers:
                continue
            transfer = Transfer(min(holders), Interval(tensor, start, stop), (*sorted(receivers),))
            if transfers and transfer.continues(transfers[-1]):
                start = transfers.pop().interval.start
                transfer = transfer._replace(interval=Interval(tensor, start, stop))
            transfers.append(transfer)
    return sorted(transfers)


class _RankRange(NamedTuple):
    """Elements of one tensor that a rank holds, or wants."""

    rank: int
    start: int
    stop: int


def _by_tensor(intervals: Sequence[Sequence[Interval]]) -> dict[int, list[_RankRange]]:
    """Number of a tensor -> the ranges of all ranks in it."""
    found: dict[int, list[_RankRange]] = {}
    for rank, own in enumerate(intervals):
        for tensor, start, stop in own:
            found.setdefault(tensor, []).append(_RankRange(rank, start, stop))
    return found


def _ranks_with(ranges: Sequence[_RankRange], start: int, stop: int) -> set[int]:
    """Return the ranks that have all elements from `start` up to `stop` in one range."""
    return {r.rank for r in ranges if r.start <= start and stop <= r.stop}
