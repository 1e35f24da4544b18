"""A metric over steps, updated while a run is active, in a bounded number of points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BINS = 500


@dataclass
class _Bin:
    low: float
    high: float
    total: float
    count: int


class Series:
    """Smallest, mean and largest value in bins of equal numbers of steps.

    A bin is one step until there are more than 2 x BINS bins; then pairs of bins are merged.
    """

    def __init__(self) -> None:
        self._bins: dict[int, _Bin] = {}
        self._width = 1

    def add(self, step: int, value: float) -> None:
        self._merge(step // self._width, _Bin(value, value, value, 1))
        while len(self._bins) > 2 * BINS:
            bins, self._bins = self._bins, {}
            self._width *= 2
            for place, found in bins.items():
                self._merge(place // 2, found)

    def _merge(self, place: int, new: _Bin) -> None:
        old = self._bins.get(place)
        if old is None:
            self._bins[place] = new
            return
        old.low, old.high = min(old.low, new.low), max(old.high, new.high)
        old.total += new.total
        old.count += new.count

    def points(self) -> dict[str, Any]:
        """x (steps), mean and, if steps share points, low and high: lists of equal length."""
        places = sorted(self._bins)
        bins = [self._bins[place] for place in places]
        middle = (self._width - 1) / 2
        found: dict[str, Any] = {
            "width": self._width,
            "x": [place * self._width + middle for place in places],
            "mean": [_short(found.total / found.count) for found in bins],
        }
        if self._width > 1:
            found["low"] = [_short(found.low) for found in bins]
            found["high"] = [_short(found.high) for found in bins]
        return found


def _short(value: float) -> float:
    """Round to the digits that a plot shows."""
    return float(f"{value:.6g}")
