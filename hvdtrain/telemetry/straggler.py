"""Which rank is slow, in which phase: decided from the time that each rank spends on its own.

The time of a step shows nothing: it is equal on all ranks, for the fast ones wait for the slow
one. What a rank does itself (compute time) is longest on a straggler.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hvdtrain.runtime.phases import PHASES

# What a rank tells of the steps since the ranks last told each other: seconds of each phase,
# and wall_seconds by another clock; see Exchange for inflight_seconds and bytes;
# micro_batches that it computed; bytes of memory now, resident and allocated on its device.
COLUMNS = (
    *PHASES,
    "wall_seconds",
    "inflight_seconds",
    "bytes",
    "micro_batches",
    "host_memory_bytes",
    "device_memory_bytes",
)
KINDS = ("data", "compute", "checkpoint")
# A rank that is slow in so many exchanges in a row is called so; and called well likewise.
PATIENCE = 3
# Of the wall time: a rank that costs less than this is nobody's concern.
_WORTH_TELLING = 0.05


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


def column(table: Tensor, name: str) -> Tensor:
    """One of `COLUMNS` of a table (ranks x columns)."""
    return table[:, COLUMNS.index(name)]


def own_seconds(table: Tensor) -> Tensor:
    """What each rank did itself (ranks x `KINDS`), as if all had equally many micro-batches.

    NaN for a rank that had none.

    Args:
        table: float64, ranks x `COLUMNS`.
    """
    micro_batches = column(table, "micro_batches")
    share = torch.where(micro_batches > 0, micro_batches.mean() / micro_batches, torch.nan)
    passes = column(table, "forward") + column(table, "backward")
    compute = passes * share + column(table, "optimizer")
    data = column(table, "data") * share
    return torch.stack([data, compute, column(table, "checkpoint")], dim=1)


def scores(table: Tensor) -> Tensor:
    """Of each rank, in (0, 1]: smallest compute time of all ranks / its own.

    Compute time is what a rank does itself: data, forward, backward, optimizer and checkpoint.
    """
    total = own_seconds(table).sum(dim=1)
    busy = total[total > 0]
    fastest = busy.min() if len(busy) else 1.0
    return (fastest / total).nan_to_num(1.0, posinf=1.0).clamp(max=1.0)


class StragglerWatch:
    """Says once when a rank has become slow, and once when it is not any more.

    Args:
        threshold: a score below it is slow.
        ranks: how many there are.

    Attributes:
        slow: rank -> one of `KINDS`.
    """

    def __init__(self, threshold: float, ranks: int) -> None:
        self._threshold = threshold
        self._slow = torch.zeros(ranks, dtype=torch.bool)
        self._in_a_row = torch.zeros(ranks, dtype=torch.int64)  # exchanges that speak against it
        self.slow: dict[int, str] = {}

    def look(self, table: Tensor) -> list[Verdict]:
        """Takes the figures of all ranks (ranks x `COLUMNS`); returns what has changed."""
        own, found = own_seconds(table), scores(table)
        total = own.sum(dim=1)
        costs = total - total.nan_to_num(torch.inf).min()
        slow = (found < self._threshold) & (costs > _WORTH_TELLING * column(table, "wall_seconds"))
        against = slow != self._slow
        self._in_a_row = torch.where(against, self._in_a_row + 1, 0)
        changed = self._in_a_row >= PATIENCE
        self._in_a_row[changed] = 0
        self._slow ^= changed
        behind = own - own.nanmedian(dim=0).values
        verdicts = []
        for rank in changed.nonzero().flatten().tolist():
            kind = self.slow.pop(rank, None) or KINDS[int(behind[rank].argmax())]
            if self._slow[rank]:
                self.slow[rank] = kind
            verdicts.append(Verdict(rank, bool(self._slow[rank]), kind, float(found[rank])))
        return verdicts
