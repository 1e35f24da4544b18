"""Which rank is slow, in which phase: decided from the time that each rank spends on its own.

The time of a step shows nothing: it is equal on all ranks, for the fast ones wait for the slow
one. What a rank does itself (compute time) is longest on a straggler.

Where a model spans ranks, a rank is compared with those that do the same work, and the stages of a
pipeline with each other: a slow stage is one of which even the fastest rank is slow. What a rank
waits for inside of its passes is not its own time; where that was not measured, as on GPUs, ranks
that wait for each other there are taken to compute as long as the one of them that is done first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hvdtrain.runtime.grid import WAITED, Grid
from hvdtrain.runtime.phases import PHASES

# What a rank tells of the steps since the ranks last told each other: seconds of each phase,
# and wall_seconds by another clock; see Exchange for inflight_seconds and bytes; micro_batches
# that it computed; of a model that spans ranks, see PhaseTimer for the seconds in which it waited
# and those in schedules of a pipeline, bubbles and steps for Bubble; bytes of memory now, resident
# and allocated on its device, and of its part of the parameters; the most memory so far of each
# phase, of its device, or resident where it has none.
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
# A rank that is slow in so many exchanges in a row is called so; and called well likewise.
PATIENCE = 3
# Of the wall time: a rank that costs less than this is nobody's concern.
_WORTH_TELLING = 0.05


@dataclass(frozen=True)
class Verdict:
    """On ranks that are slow from now on, or that are not any more.

    Args:
        ranks: whose; several where it is a stage, or where they compute in step and nobody knows
            which of them it is.
        slow: False where they were and are not any more.
        kind: data, compute or checkpoint: where most is lost against the median.
        score: as `scores`; of a stage: shortest compute time of all stages / its own.
        stage: of the pipeline, where all of it is slow.
    """

    ranks: tuple[int, ...]
    slow: bool
    kind: str
    score: float
    stage: int | None = None


def column(table: Tensor, name: str) -> Tensor:
    """One of `COLUMNS` of a table (ranks x columns)."""
    return table[:, COLUMNS.index(name)]


def own_seconds(table: Tensor, grid: Grid) -> Tensor:
    """What each rank did itself (ranks x `KINDS`), as if all had equally many micro-batches.

    NaN for a rank that had none.

    Args:
        table: float64, ranks x `COLUMNS`.
        grid: of the ranks.
    """
    micro_batches = column(table, "micro_batches")
    share = torch.where(micro_batches > 0, micro_batches.mean() / micro_batches, torch.nan)
    passes = column(table, "forward") + column(table, "backward")
    passes = passes - column(table, "waited_in_passes_seconds")
    measured = bool(column(table, "waited_in_passes_seconds").any())  # on CPUs
    for ranks in () if measured else map(list, grid.in_step):
        passes[ranks] = passes[ranks].min()
    compute = passes * share + column(table, "optimizer")
    data = column(table, "data") * share
    return torch.stack([data, compute, column(table, "checkpoint")], dim=1)


def scores(table: Tensor, grid: Grid) -> Tensor:
    """Of each rank, in (0, 1]: smallest compute time of the ranks with the same work / its own.

    Compute time is what a rank does itself: data, forward, backward, optimizer and checkpoint.
    """
    total = own_seconds(table, grid).sum(dim=1)
    found = torch.ones_like(total)
    for ranks in map(list, grid.stages):
        found[ranks] = _scores(total[ranks])
    return found


def _scores(total: Tensor) -> Tensor:
    busy = total[total > 0]
    fastest = busy.min() if len(busy) else 1.0
    return (fastest / total).nan_to_num(1.0, posinf=1.0).clamp(max=1.0)


class _Slow:
    """Which of several are slow: what was seen often enough in a row is believed.

    Args:
        threshold: a score below it is slow.
        number: of them.

    Attributes:
        kinds: number of a slow one -> one of `KINDS`.
    """

    def __init__(self, threshold: float, number: int) -> None:
        self._threshold = threshold
        self._slow = torch.zeros(number, dtype=torch.bool)
        self._in_a_row = torch.zeros(number, dtype=torch.int64)  # exchanges that speak against it
        self.kinds: dict[int, str] = {}

    def look(self, own: Tensor, wall: Tensor, groups: Iterable[list[int]]) -> list[Verdict]:
        """What has changed; a verdict's `ranks` is the number of one of them.

        Args:
            own: seconds of each, by kind.
            wall: seconds of each.
            groups: those that are compared with each other.
        """
        found, costs, behind = torch.ones_like(wall), torch.zeros_like(wall), own.clone()
        for group in groups:
            total = own[group].sum(dim=1)
            found[group] = _scores(total)
            costs[group] = total - total.nan_to_num(torch.inf).min()
            behind[group] -= own[group].nanmedian(dim=0).values
        slow = (found < self._threshold) & (costs > _WORTH_TELLING * wall)
        self._in_a_row = torch.where(slow != self._slow, self._in_a_row + 1, 0)
        changed = self._in_a_row >= PATIENCE
        self._in_a_row[changed] = 0
        self._slow ^= changed
        verdicts = []
        for one in changed.nonzero().flatten().tolist():
            kind = self.kinds.pop(one, None) or KINDS[int(behind[one].argmax())]
            if self._slow[one]:
                self.kinds[one] = kind
            verdicts.append(Verdict((one,), bool(self._slow[one]), kind, float(found[one])))
        return verdicts


class StragglerWatch:
    """Says once when a rank or a stage has become slow, and once when it is not any more.

    Args:
        threshold: a score below it is slow.
        grid: of the ranks.
    """

    def __init__(self, threshold: float, grid: Grid) -> None:
        self._grid = grid
        self._stages = [[*ranks] for ranks in grid.stages]
        self._ranks = _Slow(threshold, len(grid.ranks))
        self._slow_stages = _Slow(threshold, len(self._stages))

    @property
    def slow(self) -> dict[int, str]:
        """Rank -> one of `KINDS`; of a slow stage all ranks."""
        stages = self._slow_stages.kinds.items()
        of_stages = {rank: kind for stage, kind in stages for rank in self._stages[stage]}
        return of_stages | self._ranks.kinds

    def look(self, table: Tensor) -> list[Verdict]:
        """Takes the figures of all ranks (ranks x `COLUMNS`); returns what has changed."""
        own, wall = own_seconds(table, self._grid), column(table, "wall_seconds")
        verdicts = _together(self._ranks.look(own, wall, self._stages), self._grid.in_step)
        fastest = [ranks[_fastest(own[ranks])] for ranks in self._stages]
        everyone = [[*range(len(fastest))]]
        for verdict in self._slow_stages.look(own[fastest], wall[fastest], everyone):
            [stage] = verdict.ranks
            verdicts.append(replace(verdict, ranks=(*self._stages[stage],), stage=stage))
        return verdicts


def _fastest(own: Tensor) -> int:
    return int(own.sum(dim=1).nan_to_num(torch.inf).argmin())


def _together(verdicts: Sequence[Verdict], in_step: Iterable[tuple[int, ...]]) -> list[Verdict]:
    """One on ranks that compute in step and are all slow at that: nobody knows which of them is."""
    found = {verdict.ranks: verdict for verdict in verdicts}
    for ranks in in_step:
        own = [found.get((rank,)) for rank in ranks]
        first = own[0]
        alike = {(v.slow, v.kind) if v else None for v in own}
        if len(ranks) > 1 and first is not None and alike == {(first.slow, "compute")}:
            found[ranks] = replace(first, ranks=ranks)
            for rank in ranks:
                del found[(rank,)]
    return [*found.values()]
