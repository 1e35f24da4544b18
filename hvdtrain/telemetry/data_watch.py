"""Whether the ranks wait for their data."""

from __future__ import annotations

from torch import Tensor

from hvdtrain.telemetry.straggler import PATIENCE, column


class DataWatch:
    """Says once when loading takes longer than computing."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def look(self, table: Tensor) -> float | None:
        """How many times as long as forward and backward the median rank's loading takes.

        None where it takes less, until it has taken more PATIENCE times in a row, and once it was
        said.

        Args:
            table: float64, ranks x straggler.COLUMNS.
        """
        computing = column(table, "forward") + column(table, "backward")
        ratio = float((column(table, "data") / computing).nanmedian())
        if ratio > 1:
            self._in_a_row += 1
        elif self._in_a_row < PATIENCE:
            self._in_a_row = 0
        return ratio if ratio > 1 and self._in_a_row == PATIENCE else None
