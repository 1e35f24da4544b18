"""Which rank works on which micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from heapq import heapify, heapreplace

from hvdtrain.runtime.mesh import ALONE, Group


def even(micro_batches: int, ranks: int) -> list[int]:
    """How many each rank gets where all are as fast; the first ranks one more than the others."""
    each, left = divmod(micro_batches, ranks)
    return [each + (rank < left) for rank in range(ranks)]


def by_speed(micro_batches: int, seconds: Sequence[float], fixed: Sequence[float]) -> list[int]:
    """How many each rank gets so that the last one is done as early as can be; at least one.

    One after the other goes to the rank that would be done with it first, which is optimal: a
    rank's time grows with each.

    Args:
        micro_batches: of all ranks, at least as many as these.
        seconds: of a micro-batch on each rank.
        fixed: seconds of a step that each rank needs beside them.
    """
    counts = [1] * len(seconds)
    # When each is done with one more.
    done = [(fixed[rank] + 2 * seconds[rank], rank) for rank in range(len(seconds))]
    heapify(done)
    for _ in range(micro_batches - len(seconds)):
        after, rank = done[0]
        counts[rank] += 1
        heapreplace(done, (after + seconds[rank], rank))
    return counts


class Deal:
    """The micro-batches of this rank in a step; it changes between steps, on all ranks alike.

    Args:
        micro_batches: in a step, over all ranks together.
        group: the data axis.
        shard: ranks of a replica with equally many micro-batches of their own; a replica is dealt
            groups of so many, one for each.

    Attributes:
        counts: of each rank of `group`.
    """

    def __init__(self, micro_batches: int, group: Group, shard: Group = ALONE) -> None:
        self._rank = group.rank
        self._shard = shard
        self.change(even(micro_batches // shard.size, group.size))

    def change(self, counts: Sequence[int]) -> None:
        """Deals in turns, so that each rank's are spread over the step: with `even`, j % ranks."""
        self.counts = list(counts)
        turns = sorted(
            (Fraction(2 * number + 1, count), rank)
            for rank, count in enumerate(counts)
            for number in range(count)
        )
        of_replica = [j for j, (_, rank) in enumerate(turns) if rank == self._rank]
        self._own = [j * self._shard.size + self._shard.rank for j in of_replica]

    @property
    def in_common(self) -> int:
        """Micro-batches that every rank has."""
        return min(self.counts)

    def __len__(self) -> int:
        return len(self._own)

    def __iter__(self) -> Iterator[int]:
        """The numbers of this rank's micro-batches in the step, ascending."""
        return iter(self._own)

    def __contains__(self, number: object) -> bool:
        return number in self._own
