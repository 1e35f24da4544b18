"""Which rank is slow, in which phase: decided from the time that each rank spends on its own.

The time of a step shows nothing: it is equal on all ranks, for the fast ones wait for the slow
one. What a rank does itself (compute time) is longest on a straggler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median

from hvdtrain.telemetry.timers import PHASES, Seconds

# A rank that is slow in so many exchanges in a row is called so; and called well likewise.
PATIENCE = 3
# Of the wall time: a rank that costs less than this is nobody's concern.
_WORTH_TELLING = 0.05
KINDS = ("data", "compute", "checkpoint")


@dataclass(frozen=True)
class Window:
    """What one rank did since the ranks last told each other.

    Args:
        seconds: of each phase
        wall_seconds: by another clock than the phases
        inflight_seconds: see GradientExchange
        bytes: of gradients exchanged
        micro_batches: that this rank computed
        host_memory_bytes: resident now
        device_memory_bytes: allocated now; 0 without a device of its own
    """

    seconds: Seconds
    wall_seconds: float
    inflight_seconds: float
    bytes: float
    micro_batches: float
    host_memory_bytes: float
    device_memory_bytes: float

    def to_list(self) -> list[float]:
        """The figures in an order that `from_list` knows."""
        rest = [getattr(self, f.name) for f in fields(self)[1:]]
        return [*(self.seconds[phase] for phase in PHASES), *map(float, rest)]

    @classmethod
    def from_list(cls, values: Sequence[float]) -> Window:
        seconds = dict(zip(PHASES, values, strict=False))
        return cls(seconds, *values[len(PHASES) :])


WINDOW_LENGTH = len(PHASES) + len(fields(Window)) - 1


@dataclass(frozen=True)
class Verdict:
    """On a rank that is slow from now on, or that is not any more.

    Args:
        rank: whose
        slow: False where it was and is not any more
        kind: data, compute or checkpoint: where it loses most against the median rank
        score: as `scores`
    """

    rank: int
    slow: bool
    kind: str
    score: float


def own_seconds(windows: Sequence[Window]) -> list[dict[str, float] | None]:
    """Of each rank, by `KINDS`, as if all had computed equally many micro-batches.

    None for a rank that had no micro-batch.
    """
    mean = sum(w.micro_batches for w in windows) / len(windows)
    found: list[dict[str, float] | None] = []
    for window in windows:
        if not window.micro_batches:
            found.append(None)
            continue
        share, seconds = mean / window.micro_batches, window.seconds
        passes = seconds["forward"] + seconds["backward"]
        found.append(
            {
                "data": seconds["data"] * share,
                "compute": passes * share + seconds["optimizer"],
                "checkpoint": seconds["checkpoint"],
            }
        )
    return found


def scores(windows: Sequence[Window]) -> list[float]:
    """Smallest compute time of all ranks / own compute time, in (0, 1].

    Compute time is what a rank does itself: data, forward, backward, optimizer and checkpoint.
    """
    totals = [own and sum(own.values()) for own in own_seconds(windows)]
    fastest = min((total for total in totals if total), default=0.0)
    return [fastest / total if total else 1.0 for total in totals]


class StragglerWatch:
    """Says once when a rank has become slow, and once when it is not any more.

    Args:
        threshold: a score below it is slow.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._in_a_row: dict[int, int] = {}  # exchanges that speak against what is known
        self.slow: dict[int, str] = {}  # rank -> kind

    def look(self, windows: Sequence[Window]) -> list[Verdict]:
        """Takes the figures of all ranks, by rank; returns what has changed."""
        verdicts = []
        found = own_seconds(windows)
        totals = [own and sum(own.values()) for own in found]
        fastest = min((total for total in totals if total), default=0.0)
        for rank, (score, own) in enumerate(zip(scores(windows), found, strict=True)):
            wall = windows[rank].wall_seconds
            costs = own is not None and sum(own.values()) - fastest > _WORTH_TELLING * wall
            slow = score < self._threshold and costs
            if slow == (rank in self.slow):
                self._in_a_row[rank] = 0
                continue
            self._in_a_row[rank] = self._in_a_row.get(rank, 0) + 1
            if self._in_a_row[rank] < PATIENCE:
                continue
            self._in_a_row[rank] = 0
            kind = self.slow.pop(rank, None) or _worst(own or {}, found)
            if slow:
                self.slow[rank] = kind
            verdicts.append(Verdict(rank, slow, kind, score))
        return verdicts


def _worst(own: dict[str, float], all_ranks: Sequence[dict[str, float] | None]) -> str:
    """Where a rank loses most against the median rank."""
    known = [seconds for seconds in all_ranks if seconds is not None]
    return max(KINDS, key=lambda kind: own.get(kind, 0.0) - median(o[kind] for o in known))
