"""Which blocks of a model each stage of a pipeline holds: arithmetic, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.errors import UserError


@dataclass(frozen=True)
class Layout:
    """Stages and the ranks that hold them.

    Stage s is on rank s % ranks, so with several stages a rank the data goes round the ranks
    (Narayanan et al., arXiv:2104.04473, section 2.2).

    Args:
        ranks: of the pipeline.
        virtual: stages of each rank.
    """

    ranks: int
    virtual: int = 1

    @property
    def stages(self) -> int:
        """Of all ranks."""
        return self.ranks * self.virtual

    def of_rank(self, rank: int) -> range:
        """The stages of a rank, ascending."""
        return range(rank, self.stages, self.ranks)

    def bubble(self, micro_batches: int) -> float:
        """Fraction of a step that a rank waits where all stages are as fast, of GPipe and 1F1B.

        Narayanan et al., arXiv:2104.04473, sections 2.1 and 2.2.
        """
        waits = self.ranks - 1
        return waits / (self.virtual * micro_batches + waits)


@dataclass(frozen=True)
class Costs:
    """What each part of a model costs, in any unit.

    Args:
        first: what comes before the blocks.
        blocks: each of them.
        last: what comes after the blocks.
    """

    first: float
    blocks: Sequence[float]
    last: float


def divide(costs: Costs, stages: int) -> list[range]:
    """The blocks of each stage, at least one: neighbours, so that the dearest stage costs least.

    Of such divisions, one whose sum of squared costs is least, so that the others are even too.

    Raises:
        UserError: there are fewer blocks than stages.
    """
    blocks = len(costs.blocks)
    if blocks < stages:
        raise UserError(
            f"a pipeline of {stages} stages needs as many blocks, and the model has {blocks}: "
            f"lower parallel.pipeline or the stages of a rank, or choose more blocks"
        )
    bound = _best(costs, stages, float("inf"), dearest=True)[0]
    ends = _best(costs, stages, bound, dearest=False)[1]
    return [range(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _best(costs: Costs, stages: int, bound: float, dearest: bool) -> tuple[float, tuple[int, ...]]:
    """(how good, where each stage ends) of the best division with no stage above `bound`.

    Args:
        dearest: the best has the least cost of the dearest stage; else the least sum of squares.
    """
    sums = [0.0]
    for cost in costs.blocks:
        sums.append(sums[-1] + cost)
    blocks = len(costs.blocks)
    # Of the first `end` blocks in as many stages as there were turns.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        ends = [blocks] if stage == stages - 1 else range(stage + 1, blocks - stages + stage + 2)
        found = {}
        for end in ends:
            options = []
            for begin, (so_far, places) in best.items():
                cost = sums[end] - sums[begin]
                cost += costs.first * (stage == 0) + costs.last * (stage == stages - 1)
                # Sums differ in their last bits from those that the bound was found with.
                if begin < end and cost <= bound * (1 + 1e-9):
                    value = max(so_far, cost) if dearest else so_far + cost * cost
                    options.append((value, (*places, end)))
            if options:
                found[end] = min(options)
        best = found
    return best[blocks]
