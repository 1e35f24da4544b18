"""Selection of the rank whose state all ranks resume from after a rendezvous.

A state is one unit: tensors, progress and whatever else a step changes. On each rank a step changes
all of it or nothing. After a failure some ranks may have taken one step more than others. The most
advanced ranks all have the state that an undisturbed run has after that step. A rank keeps its own
state, even if it is a step behind, until it has received a newer one completely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RankStatus:
    """The status of a rank in a rendezvous.

    Args:
        trained: it holds the state of this run; a new process does not.
        step: optimizer steps done.
        reaches: the step that it can reach by itself, see Agreement; default: `step`.
    """

    trained: bool
    step: int
    reaches: int | None = None

    def caught_up(self, newest: int) -> RankStatus:
        """Return the status after taking the pending step if another rank has taken that step."""
        step = newest if self.trained and self.reaches == newest else self.step
        return replace(self, step=step, reaches=None)


def most_advanced(statuses: Sequence[RankStatus]) -> int | None:
    """Return the lowest of the most advanced ranks; None if no rank has trained."""
    steps = [s.step if s.trained else -1 for s in statuses]
    return None if max(steps) < 0 else steps.index(max(steps))


def all_equal(statuses: Sequence[RankStatus]) -> bool:
    """Whether all ranks already hold the same state."""
    return all(s == statuses[0] and s.trained for s in statuses)
