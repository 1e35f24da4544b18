"""Assignment of a model's blocks to pipeline stages: arithmetic, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.errors import UserError


@dataclass(frozen=True)
class Layout:
    """Stages and the ranks that hold them.

    Stage s is on rank s % ranks, so with several stages per rank the data passes around the ranks
    (Narayanan et al., arXiv:2104.04473, section 2.2).

    Args:
        ranks: of the pipeline.
        virtual: stages of each rank.
    """

    ranks: int
    virtual: int = 1

    @property
    def stages(self) -> int:
        """Number of stages on all ranks."""
        return self.ranks * self.virtual

    def of_rank(self, rank: int) -> range:
        """The stages of a rank, ascending."""
        return range(rank, self.stages, self.ranks)

    def bubble(self, micro_batches: int) -> float:
        """Fraction of a step that a rank waits with GPipe and 1F1B if all stages are equally fast.

        Narayanan et al., arXiv:2104.04473, sections 2.1 and 2.2.
        """
        waits = self.ranks - 1
        return waits / (self.virtual * micro_batches + waits)


@dataclass(frozen=True)
class Costs:
    """Cost of each part of a model, in any unit.

    Args:
        first: modules before the blocks.
        blocks: each block.
        last: modules after the blocks.
    """

    first: float
    blocks: Sequence[float]
    last: float


def divide(costs: Costs, stages: int) -> list[range]:
    """The blocks of each stage: at least one, contiguous, minimizing the most expensive stage.

    Among such divisions, one with the least sum of squared costs, so that the other stages are
    balanced too.

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
    """(value, end of each stage) of the best division with no stage above `bound`.

    Args:
        dearest: minimize the cost of the most expensive stage; else the sum of squares.
    """
    sums = [0.0]
    for cost in costs.blocks:
        sums.append(sums[-1] + cost)
    blocks = len(costs.blocks)
    # Best division of the first `end` blocks into the stages so far.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        ends = [blocks] if stage == stages - 1 else range(stage + 1, blocks - stages + stage + 2)
        found = {}
        for end in ends:
            options = []
            for begin, (so_far, places) in best.items():
                cost = sums[end] - sums[begin]
                cost += costs.first * (stage == 0) + costs.last * (stage == stages - 1)
                # Sums differ in their last bits from the sums that determined the bound.
                if begin < end and cost <= bound * (1 + 1e-9):
                    value = max(so_far, cost) if dearest else so_far + cost * cost
                    options.append((value, (*places, end)))
            if options:
                found[end] = min(options)
        best = found
    return best[blocks]
