"""The validation losses of a run, as far as early stop and the best checkpoint need them.

[step, loss] of evaluations from the best one on, the latest last; a loss that is not finite is None
and never the best. All ranks hold the same: the losses are all-reduced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Evaluations = list[list[Any]]


def with_evaluation(evaluations: Evaluations, step: int, loss: float) -> Evaluations:
    """Adds one.

    One of the same step takes the place of the one before: after a failure, ranks that had it
    evaluate again with those that had not, and hold the same then.
    """
    before = evaluations_before(evaluations, step)
    if before:
        before = before[_best(before) :]
    return [*before, [step, loss if math.isfinite(loss) else None]]


def evaluations_before(evaluations: Evaluations, step: int) -> Evaluations:
    return [one for one in evaluations if one[0] < step]


def since_best(evaluations: Evaluations) -> int:
    """Evaluations after the best one."""
    return len(evaluations) - 1 - _best(evaluations) if evaluations else 0


def is_best(evaluations: Evaluations, step: int) -> bool:
    """The latest was after this step, and its loss is lower than all before."""
    if not evaluations or evaluations[-1][0] != step or evaluations[-1][1] is None:
        return False
    return since_best(evaluations) == 0


def _best(evaluations: Sequence[Sequence[Any]]) -> int:
    """The first with the lowest loss."""
    losses = [math.inf if loss is None else loss for _, loss in evaluations]
    return losses.index(min(losses))
