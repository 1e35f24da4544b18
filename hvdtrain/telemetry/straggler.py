"""Detection of slow ranks, and of the phase in which they are slow, from each rank's own time.

The step time does not reveal them: it is equal on all ranks, because fast ranks wait for slow ones.
The time that a rank spends on its own work (compute time) is longest on a straggler.

If a model spans ranks, a rank is compared with the ranks that do the same work, and pipeline stages
are compared with each other: in a slow stage, even the fastest rank is slow. Waiting inside a
rank's passes is not its own time. If the waiting was not measured, as on GPUs, ranks that wait for
each other are assumed to compute as long as the fastest of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hvdtrain.runtime.mesh import WAITED, Grid
from hvdtrain.runtime.phases import PHASES

# Values that ranks exchange about the steps since the last exchange: seconds of each phase, and
# wall_seconds by another clock; inflight_seconds and bytes, see Exchange; micro_batches computed.
# For a model that spans ranks: seconds of waiting and in pipeline schedules, see PhaseTimer. Bytes
# of memory now, resident and allocated on the device, and of the rank's parameter shards; the peak
# memory so far of each phase, on the device, or resident memory without a device.
COLUMNS = (
    *PHASES,
    "wall_seconds",
    "inflight_seconds",
    "bytes",
    "micro_batches",
    *(f"{axis}_wait_seconds" for axis in WAITED),
    "waited_in_passes_seconds",
    "schedule_seconds",
    "host_memory_bytes",
    "device_memory_bytes",
    "parameter_bytes",
    *(f"{phase}_memory_peak_bytes" for phase in PHASES),
)
KINDS = ("data", "compute", "checkpoint")

# Not tensors: with a few ranks, numpy takes a quarter of torch's time.
Table = NDArray[np.float64]  # ranks x COLUMNS, or a part of it
# Number of consecutive exchanges after which a rank is reported as slow, or as no longer slow, and
# the seconds that they must span: with short steps, a few exchanges pass while another process has
# a rank's core.
CONSECUTIVE = 3
_EVIDENCE_SECONDS = 0.2
# Fraction of the wall time; a rank that costs less is not reported.
_SIGNIFICANT = 0.05


@dataclass(frozen=True)
class StragglerChange:
    """Change of state of ranks that have become slow, or are no longer slow.

    Args:
        ranks: several for a stage, or for indistinguishable ranks that compute in step.
        slow: False if the ranks are no longer slow.
        kind: data, compute or checkpoint: where most time is lost compared with the median.
        score: see `scores`; for a stage: shortest compute time of all stages / its own.
        stage: stage of the pipeline, if the whole stage is slow.
    """

    ranks: tuple[int, ...]
    slow: bool
    kind: str
    score: float
    stage: int | None = None


def column(table: Table, name: str) -> Table:
    """One of `COLUMNS` of a table (ranks x columns)."""
    return table[:, COLUMNS.index(name)]


def own_seconds(table: Table, grid: Grid) -> Table:
    """Time of each rank's own work (ranks x `KINDS`), normalized to equally many micro-batches.

    NaN for a rank without micro-batches.

    Args:
        table: ranks x `COLUMNS`.
        grid: grid of the ranks.
    """
    micro_batches = column(table, "micro_batches")
    works = micro_batches > 0
    share = np.where(works, micro_batches.mean() / np.where(works, micro_batches, 1.0), np.nan)
    passes = column(table, "forward") + column(table, "backward")
    passes = passes - column(table, "waited_in_passes_seconds")
    measured = bool(column(table, "waited_in_passes_seconds").any())  # on CPUs
    for ranks in () if measured else map(list, grid.in_step):
        passes[ranks] = passes[ranks].min()
    compute = passes * share + column(table, "optimizer")
    data = column(table, "data") * share
    return np.stack([data, compute, column(table, "checkpoint")], axis=1)


def scores(table: Table, grid: Grid) -> Table:
    """Score of each rank, in (0, 1]: smallest compute time of ranks with the same work / its own.

    Compute time is the rank's own work: data, forward, backward, optimizer and checkpoint.
    """
    total = own_seconds(table, grid).sum(axis=1)
    found = np.ones_like(total)
    for ranks in map(list, grid.stages):
        found[ranks] = _scores(total[ranks])
    return found


def _scores(total: Table) -> Table:
    works = total > 0  # others have no micro-batch
    if not works.any():
        return np.ones_like(total)
    return np.where(works, total[works].min() / np.where(works, total, 1.0), 1.0)


def _median(values: Table) -> Table:
    """The lower median of each column, or of a vector, without NaNs; NaN if there is no number."""
    ordered = np.sort(values, axis=0)  # NaNs come last
    middle = (np.count_nonzero(~np.isnan(values), axis=0) - 1) // 2
    return np.take_along_axis(ordered, np.asarray(middle)[None], axis=0)[0]


class _Slow:
    """Set of slow members (ranks or stages), which changes only after repeated evidence.

    Args:
        threshold: a score below it is slow.
        number: number of members.

    Attributes:
        kinds: number of a slow member -> one of `KINDS`.
    """

    def __init__(self, threshold: float, number: int) -> None:
        self._threshold = threshold
        self._slow = np.zeros(number, dtype=np.bool_)
        self._in_a_row = np.zeros(number, dtype=np.int64)  # consecutive contrary exchanges
        self._seconds = np.zeros(number)  # of these exchanges
        self.kinds: dict[int, str] = {}

    def look(self, own: Table, wall: Table, groups: Iterable[list[int]]) -> list[StragglerChange]:
        """Return the changes; a change's `ranks` is the number of one member.

        Args:
            own: seconds of each member, by kind.
            wall: seconds of each member.
            groups: members that are compared with each other.
        """
        found, costs, behind = np.ones_like(wall), np.zeros_like(wall), own.copy()
        for group in groups:
            total = own[group].sum(axis=1)
            found[group] = _scores(total)
            costs[group] = total - np.where(np.isnan(total), np.inf, total).min()
            behind[group] -= _median(own[group])
        slow = (found < self._threshold) & (costs > _SIGNIFICANT * wall)
        contrary = slow != self._slow
        self._in_a_row = np.where(contrary, self._in_a_row + 1, 0)
        self._seconds = np.where(contrary, self._seconds + wall, 0.0)
        changed = (self._in_a_row >= CONSECUTIVE) & (self._seconds >= _EVIDENCE_SECONDS)
        self._in_a_row[changed] = 0
        self._seconds[changed] = 0.0
        self._slow ^= changed
        changes = []
        for one in np.flatnonzero(changed).tolist():
            kind = self.kinds.pop(one, None) or KINDS[int(behind[one].argmax())]
            if self._slow[one]:
                self.kinds[one] = kind
            changes.append(StragglerChange((one,), bool(self._slow[one]), kind, float(found[one])))
        return changes


class StragglerWatch:
    """Detector of slow ranks and stages; reports once when one becomes slow, and once when it ends.

    Args:
        threshold: a score below it is slow.
        grid: grid of the ranks.
    """

    def __init__(self, threshold: float, grid: Grid) -> None:
        self._grid = grid
        self._stages = [[*ranks] for ranks in grid.stages]
        self._ranks = _Slow(threshold, len(grid.ranks))
        self._slow_stages = _Slow(threshold, len(self._stages))

    @property
    def slow(self) -> dict[int, str]:
        """Rank -> one of `KINDS`; for a slow stage, all its ranks."""
        stages = self._slow_stages.kinds.items()
        of_stages = {rank: kind for stage, kind in stages for rank in self._stages[stage]}
        return of_stages | self._ranks.kinds

    def look(self, table: Table) -> list[StragglerChange]:
        """Process the values of all ranks (ranks x `COLUMNS`); return the changes."""
        own, wall = own_seconds(table, self._grid), column(table, "wall_seconds")
        changes = _together(self._ranks.look(own, wall, self._stages), self._grid.in_step)
        totals = own.sum(axis=1)
        totals = np.where(np.isnan(totals), np.inf, totals)
        fastest = [ranks[int(totals[ranks].argmin())] for ranks in self._stages]
        all_stages = [[*range(len(fastest))]]
        for change in self._slow_stages.look(own[fastest], wall[fastest], all_stages):
            [stage] = change.ranks
            changes.append(replace(change, ranks=(*self._stages[stage],), stage=stage))
        return changes


def _together(
    changes: Sequence[StragglerChange], in_step: Iterable[tuple[int, ...]]
) -> list[StragglerChange]:
    """Merge changes of slow ranks that compute in step, because they cannot be distinguished."""
    found = {change.ranks: change for change in changes}
    for ranks in in_step:
        own = [found.get((rank,)) for rank in ranks]
        first = own[0]
        states = {(v.slow, v.kind) if v else None for v in own}
        if len(ranks) > 1 and first is not None and states == {(first.slow, "compute")}:
            found[ranks] = replace(first, ranks=ranks)
            for rank in ranks:
                del found[(rank,)]
    return [*found.values()]


class DataWatch:
    """Detector of loading that takes longer than computing; reports it once."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def look(self, table: Table) -> float | None:
        """The median rank's loading time as a multiple of its forward and backward time.

        None if the ratio is at most 1, has not been above 1 CONSECUTIVE times in a row, or was
        reported before.

        Args:
            table: see StragglerWatch.
        """
        computing = column(table, "forward") + column(table, "backward")
        works = computing > 0  # some ranks may have no micro-batch
        ratios = column(table, "data")[works] / computing[works]
        ratio = float(_median(ratios)) if len(ratios) else 0.0
        if ratio > 1:
            self._in_a_row += 1
        elif self._in_a_row < CONSECUTIVE:
            self._in_a_row = 0
        return ratio if ratio > 1 and self._in_a_row == CONSECUTIVE else None
