"""When micro-batches are dealt anew: from the times that the ranks tell each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from hvdtrain.data.deal import by_speed
from hvdtrain.telemetry.straggler import column

# A deal follows from the medians of so many comparisons, none of them of an earlier deal.
_COMPARISONS = 3
# It must promise steps that are shorter by this: each change costs as much as it is wrong.
_GAIN = 0.05


class Speeds:
    """Of all ranks, alike on each of them: they decide by the same figures."""

    def __init__(self) -> None:
        self._seconds: deque[Tensor] = deque(maxlen=_COMPARISONS)

    def look(self, table: Tensor, counts: Sequence[int]) -> list[int] | None:
        """How many micro-batches each rank shall have from now on; None: as before.

        Args:
            table: of straggler.py.
            counts: of each rank now.
        """
        of_ranks = column(table, "micro_batches")
        steps = of_ranks.sum() / sum(counts)
        if not of_ranks.all():
            return None  # fewer micro-batches than ranks: there is nothing to deal
        of_each = sum(column(table, name) for name in ("data", "forward", "backward")) / of_ranks
        fixed = (column(table, "optimizer") + column(table, "checkpoint")) / steps
        self._seconds.append(torch.stack((of_each, fixed)))
        if len(self._seconds) < _COMPARISONS:
            return None
        seconds, beside = torch.stack(list(self._seconds)).median(dim=0).values.tolist()

        def lasts(counts: Sequence[int]) -> float:
            return max(b + n * s for b, n, s in zip(beside, counts, seconds, strict=True))

        found = by_speed(sum(counts), seconds, beside)
        if lasts(found) > (1 - _GAIN) * lasts(counts):
            return None
        self._seconds.clear()
        return found
