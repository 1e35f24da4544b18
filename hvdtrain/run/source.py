"""Which rank's state all resume from after they have met.

A step is applied on a rank only when its whole exchange was completed. So after a failure
some ranks may have done one step more than others, and the state of any of the most advanced is
what an undisturbed run has after that step: nothing is rolled back, and no copies are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankStatus:
    """The status of a rank in a rendezvous.

    Args:
        trained: it holds the state of this run; a new process does not.
        step: optimizer steps done.
    """

    trained: bool
    step: int


def most_advanced(statuses: Sequence[RankStatus]) -> int | None:
    """The lowest rank of the most advanced ranks; None where no rank has trained."""
    steps = [s.step if s.trained else -1 for s in statuses]
    return None if max(steps) < 0 else steps.index(max(steps))


def all_equal(statuses: Sequence[RankStatus]) -> bool:
    """Whether all ranks hold the same state already."""
    return all(s == statuses[0] and s.trained for s in statuses)
