"""Assignment of a step's micro-batches to ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace

from hvdtrain.data.order import spread
from hvdtrain.runtime.mesh import ALONE, Group


def even(micro_batches: int, ranks: int) -> list[int]:
    """Micro-batches per rank at equal speed; the first ranks may get one more than the others."""
    each, left = divmod(micro_batches, ranks)
    return [each + (rank < left) for rank in range(ranks)]


def by_speed(micro_batches: int, seconds: Sequence[float], fixed: Sequence[float]) -> list[int]:
    """Micro-batches per rank, at least one each, that minimize the finish time of the last rank.

    Assigns each to the rank that would finish it first. This greedy assignment is optimal because a
    rank's time grows with each micro-batch.

    Args:
        micro_batches: over all ranks, at least one per rank.
        seconds: per micro-batch on each rank.
        fixed: other seconds of a step on each rank.
    """
    counts = [1] * len(seconds)
    # Finish time of each rank with one more micro-batch.
    done = [(fixed[rank] + 2 * seconds[rank], rank) for rank in range(len(seconds))]
    heapify(done)
    for _ in range(micro_batches - len(seconds)):
        after, rank = done[0]
        counts[rank] += 1
        heapreplace(done, (after + seconds[rank], rank))
    return counts


class Assignment:
    """The micro-batches of this rank in a step; changes between steps, identically on all ranks.

    Args:
        micro_batches: in a step, over all ranks.
        group: the data axis.
        shard: ranks of a replica that process equally many micro-batches each; a replica is
            assigned groups of `shard.size` micro-batches, one per rank.

    Attributes:
        counts: number of assigned micro-batches (groups) per rank of `group`.
        last: the rank of `group` with the last micro-batch (group) of a step.
    """

    def __init__(self, micro_batches: int, group: Group, shard: Group = ALONE) -> None:
        self._rank = group.rank
        self._shard = shard
        self.change(even(micro_batches // shard.size, group.size))

    def change(self, counts: Sequence[int]) -> None:
        """Interleave the ranks, so that each rank's are spread over the step; `even`: j % ranks."""
        self.counts = list(counts)
        turns = spread(counts)
        self.last = turns[-1] if turns else 0
        of_replica = [j for j, rank in enumerate(turns) if rank == self._rank]
        self._own = [j * self._shard.size + self._shard.rank for j in of_replica]

    @property
    def in_common(self) -> int:
        """Number of micro-batches that every rank has."""
        return min(self.counts)

    def __len__(self) -> int:
        return len(self._own)

    def __iter__(self) -> Iterator[int]:
        """The numbers of this rank's micro-batches in the step, ascending."""
        return iter(self._own)

    def __contains__(self, number: object) -> bool:
        return number in self._own
