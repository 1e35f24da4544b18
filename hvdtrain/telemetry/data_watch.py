"""Detection of ranks that wait for their data."""

from __future__ import annotations

from torch import Tensor

from hvdtrain.telemetry.straggler import PATIENCE, column


class DataWatch:
    """Detector of loading that takes longer than computing; reports it once."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def look(self, table: Tensor) -> float | None:
        """The median rank's loading time as a multiple of its forward and backward time.

        None if the ratio is at most 1, has not been above 1 PATIENCE times in a row, or was
        reported before.

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
