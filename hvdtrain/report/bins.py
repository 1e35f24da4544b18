"""Reduce many points to few without hiding extremes: smallest, median and largest values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdtrain.report.run import Column

COLUMNS = 500
ROWS = 128


@dataclass
class Band:
    """For each bin of x: its middle, and the smallest, median and largest y in it.

    Args:
        exact: each point is one bin
    """

    x: Column
    low: Column
    middle: Column
    high: Column
    exact: bool


def band(x: Column, y: Column, limit: int = COLUMNS) -> Band:
    """Make at most `limit` bins of equal width.

    Args:
        x: in any order (N).
        y: (N) or (N x M): all M values of a row belong to its x; non-finite values are omitted, so
            there may be no bin at all.
    """
    y = y if y.ndim == 2 else y[:, None]
    known = np.isfinite(y).any(axis=1)
    x, y = x[known], y[known]
    if not len(x):
        return Band(x, x, x, x, exact=True)
    exact = len(x) <= limit
    if exact:
        starts, x_of = np.arange(len(x)), x
    else:
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
        width = (x[-1] - x[0]) / limit or 1.0
        number = np.minimum(((x - x[0]) / width).astype(np.int64), limit - 1)
        bins, starts = np.unique(number, return_index=True)
        x_of = x[0] + (bins + 0.5) * width
    stops = [*starts[1:], len(x)]
    pieces = [y[a:b][np.isfinite(y[a:b])] for a, b in zip(starts, stops, strict=True)]
    low, middle, high = (
        np.array([f(piece) for piece in pieces]) for f in (np.min, np.median, np.max)
    )
    return Band(x_of, low, middle, high, exact and y.shape[1] == 1)


@dataclass
class Heat:
    """The smallest value in each cell; NaN if there was none.

    Args:
        cells: rows x columns
        left, right: edges of the first and the last column, in steps
        ranks_per_row: number of ranks that share a row
    """

    cells: Column
    left: float
    right: float
    ranks_per_row: int


def heat(step: Column, steps: Column, values: Column) -> Heat:
    """Cells from windows that end at `step` and span `steps` (L), with a value per rank (L x R)."""
    left, right = float((step - steps).min()), float(step.max())
    length = max(1.0, float(np.median(steps)))
    count = min(COLUMNS, max(1, round((right - left) / length)))
    group = -(-values.shape[1] // ROWS)
    padded = np.full((len(values), -(-values.shape[1] // group) * group), np.inf)
    padded[:, : values.shape[1]] = np.where(np.isfinite(values), values, np.inf)
    rows = padded.reshape(len(values), -1, group).min(axis=2)
    width = (right - left) / count or 1.0
    first = np.floor((step - steps - left) / width + 1e-9).astype(np.int64)
    stop = np.maximum(first + 1, np.ceil((step - left) / width - 1e-9).astype(np.int64))
    cells = np.full((rows.shape[1], count), np.inf)
    for row, begin, end in zip(rows, first, stop, strict=True):
        cells[:, begin:end] = np.minimum(cells[:, begin:end], row[:, None])
    return Heat(np.where(np.isinf(cells), np.nan, cells), left, right, group)
