"""Which rank's state all go on from after they have met.

A step is applied on a rank only when its whole exchange was completed. So after a failure
some ranks may have done one step more than others, and the state of any that got furthest is
what an undisturbed run has after that step: nothing is rolled back, and no copies are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Standing:
    """Where a rank stands when the ranks meet.

    Args:
        trained: it holds the state of this run; a new process does not.
        step: optimizer steps done.
    """

    trained: bool
    step: int


def furthest(standings: Sequence[Standing]) -> int | None:
    """The lowest rank of those that got furthest; None where no rank has trained."""
    steps = [s.step if s.trained else -1 for s in standings]
    return None if max(steps) < 0 else steps.index(max(steps))


def alike(standings: Sequence[Standing]) -> bool:
    """Whether all ranks hold the same state already."""
    return all(s == standings[0] and s.trained for s in standings)
