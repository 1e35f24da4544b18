"""A random sample of a table's rows, independent of how ranks share the table."""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import NDArray

_ROWS = 1 << 14


class Sample:
    """The rows with the smallest keys; a key is a hash of the row's place in the table.

    Samples of parts of a table can be merged in any order (a bottom-k sketch: Cohen and Kaplan,
    "Summarizing data using bottom-k sketches", 2007). A table of at most 16,384 rows is included
    completely.

    Attributes:
        values: (rows, width) float64, in the order of the keys; NaN if missing.
    """

    def __init__(self, width: int) -> None:
        self.values = np.empty((0, width))
        self._keys = np.empty(0, np.uint64)

    def add(self, part: int, rows: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Add rows of a part.

        Args:
            part: its number in the table.
            rows: their numbers in the part.
            values: (len(rows), width).
        """
        places = np.uint64(part << 32) + rows.astype(np.uint64)
        self._keep(_hash(places), values)

    def state(self) -> list[str]:
        """State for `merge` on another rank; JSON-serializable."""
        return [base64.b64encode(array.tobytes()).decode() for array in (self._keys, self.values)]

    def merge(self, state: list[str]) -> None:
        keys = np.frombuffer(base64.b64decode(state[0]), np.uint64)
        values = np.frombuffer(base64.b64decode(state[1]))
        self._keep(keys, values.reshape(len(keys), self.values.shape[1]))

    def _keep(self, keys: NDArray[np.uint64], values: NDArray[np.float64]) -> None:
        if len(self._keys) == _ROWS:
            smaller = keys < self._keys[-1]
            keys, values = keys[smaller], values[smaller]
        keys = np.concatenate((self._keys, keys))
        kept = np.argsort(keys, kind="stable")[:_ROWS]
        self._keys = keys[kept]
        self.values = np.concatenate((self.values, values))[kept]


def _hash(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64 (Steele, Lea and Flood, 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
