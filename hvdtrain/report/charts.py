"""Charts as JSON, which static/page.js draws with uPlot; long curves have a bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdtrain.report.run import Column

COLUMNS = 500
ROWS = 128
# Indices into the page's palette, which depends on the theme.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY, YELLOW, BROWN = range(8)
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, RED, YELLOW, BROWN, GREY)
_PHASES = {
    "data": YELLOW,
    "forward": BLUE,
    "backward": GREEN,
    "comm_exposed": RED,
    "optimizer": PURPLE,
    "eval": ORANGE,
    "checkpoint": BROWN,
}

Chart = dict[str, Any]
# x, y and, if several values share a point, low and high: lists of equal length; None is unknown.
Points = dict[str, list[Any]]


@dataclass(frozen=True)
class StepMetric:
    """A metric over the steps; `factor` converts recorded values to the unit.

    The page can smooth a metric that is noisy.
    """

    title: str
    unit: str
    name: str
    color: int
    factor: float = 1.0
    zero: bool = True
    noisy: bool = True

    def series(self, points: Points | None) -> Chart:
        return series(self.name, scaled(points, self.factor), self.color, noisy=self.noisy)


# Metrics that each line has, unless the value is not finite.
DENSE = ("loss", "grad_norm")
STEP_METRICS = {
    "loss": StepMetric("Loss", "", "training", BLUE, zero=False),
    "validation_loss": StepMetric(
        "Validation loss", "", "validation", ORANGE, zero=False, noisy=False
    ),
    "samples_per_second": StepMetric("Throughput", "samples/s", "samples/s", GREEN),
    "step_seconds": StepMetric("Step time", "ms", "ms", BLUE, 1e3),
    "grad_norm": StepMetric("Gradient norm", "", "norm", PURPLE),
    "lr": StepMetric("Learning rate", "", "rate", ORANGE, noisy=False),
    "exposed": StepMetric("Exposed communication", "% of the ranks' time", "share", RED, 100.0),
    "score": StepMetric("Score of the slowest rank", "", "score (fastest = 1)", ORANGE),
}


def of_run(metrics: Mapping[str, Points]) -> dict[str, Chart]:
    """Return the charts of a run, by metric; the chart of the loss includes the validation loss."""
    found = {}
    for key in STEP_METRICS:
        shown = _metric(key, [metrics])
        drawn = [shown.series(metrics.get(key))]
        if key == "loss":
            drawn.append(STEP_METRICS["validation_loss"].series(metrics.get("validation_loss")))
        elif key == "validation_loss":
            continue
        chart = _over_steps(key, shown, drawn)
        if chart["series"]:
            found[key] = chart
    return found


def of_runs(runs: Mapping[str, Mapping[str, Points]]) -> list[Chart]:
    """Return charts that compare runs, each with the differences from the first run.

    Args:
        runs: name -> metric -> points.
    """
    found = []
    if len(runs) > 2:  # the bands of many runs would hide their lines
        runs = {name: _without_bands(metrics) for name, metrics in runs.items()}
    for key in STEP_METRICS:
        shown = _metric(key, [*runs.values()])
        drawn = [
            replace(shown, name=name, color=PALETTE[at % len(PALETTE)]).series(metrics.get(key))
            | {"run": at, "dash": at % 2 == 1}
            for at, (name, metrics) in enumerate(runs.items())
        ]
        chart = _over_steps(key, shown, drawn)
        if not chart["series"]:
            continue
        first, *others = drawn
        apart = [
            series(name, _difference(first, b), b["color"], dash=b["dash"], noisy=shown.noisy)
            for b in others
            for name in (f"{b['name']} − {first['name']}",)
        ]
        chart["difference"] = lines("", shown.unit, apart)
        absent = [one["name"] for one in drawn if not one["x"]]
        chart["caption"] = f"Unknown for {', '.join(absent)}." if absent else ""
        found.append(chart)
    return found


def _metric(key: str, runs: Sequence[Mapping[str, Points]]) -> StepMetric:
    """Return a metric as it is shown: step times in seconds if a run's median is at least 1 s."""
    shown = STEP_METRICS[key]
    known = ([y for y in run[key]["y"] if y is not None] for run in runs if key in run)
    if key == "step_seconds" and any(ys and np.median(ys) >= 1 for ys in known):
        return replace(shown, unit="s", name="s", factor=1.0)
    return shown


def _over_steps(key: str, shown: StepMetric, drawn: list[Chart]) -> Chart:
    """Make the chart of a metric; long steps make the axis of the step time logarithmic."""
    chart = lines(shown.title, shown.unit, drawn, zero=shown.zero, wide=key == "loss")
    every = [y for one in drawn for y in (*one["y"], *one.get("high", ())) if y is not None]
    if key == "step_seconds" and every and min(every) > 0:
        chart |= {"log": "y"} if max(every) > 10 * float(np.median(every)) else {}
    return chart


def _without_bands(metrics: Mapping[str, Points]) -> dict[str, Points]:
    return {key: {"x": points["x"], "y": points["y"]} for key, points in metrics.items()}


def _difference(a: Chart, b: Chart) -> Points:
    """B - A at the points of A that B's steps include; B is interpolated linearly."""
    if not a["x"] or not b["x"]:
        return {"x": [], "y": []}
    (x, y), (x_of_b, y_of_b) = (np.array([one["x"], one["y"]], dtype=np.float64) for one in (a, b))
    inside = (x >= x_of_b[0]) & (x <= x_of_b[-1])
    apart = np.interp(x[inside], x_of_b, y_of_b) - y[inside]
    return to_points(x[inside], apart, 2 * COLUMNS, gaps=True)


def series(
    name: str, points: Points | None, color: int, *, dash: bool = False, noisy: bool = False
) -> Chart:
    """One line; the page can smooth it if it is noisy.

    `run` selects the clock of the page that converts its steps to seconds.
    """
    return {
        "name": name,
        "color": color,
        "run": 0,
        "dash": dash,
        "noisy": noisy,
        **(points or {"x": [], "y": []}),
    }


def lines(title: str, unit: str, drawn: Iterable[Chart], **options: Any) -> Chart:
    """Make a chart of lines; series without points are omitted.

    Args:
        options: x: "step" (default; the page can show times instead), "seconds" or the label of
            another axis. zero: y begins at 0. log: axes that are logarithmic ("y", "xy"). wide: it
            has the width of the page. note: result, below the title. caption: definitions.
    """
    return {"title": title, "unit": unit, "series": [one for one in drawn if one["x"]], **options}


def phases(title: str, seconds: Mapping[str, Sequence[float]], labels: list[str]) -> Chart:
    """Make a chart of stacked bars, in milliseconds per step.

    Args:
        seconds: phase -> seconds per step for each label (R).
    """
    longest = max(map(sum, zip(*seconds.values(), strict=True)), default=0.0)
    drawn = [
        {"name": name, "color": _PHASES.get(name, GREY), "y": _rounded(np.array(values) * 1e3)}
        for name, values in seconds.items()
        if max(values, default=0.0) > longest * 1e-3
    ]
    return {"title": title, "unit": "ms/step", "labels": labels, "series": drawn, "wide": True}


def scaled(points: Points | None, factor: float) -> Points | None:
    if points is None or factor == 1:
        return points
    return {
        key: values if key == "x" else _rounded(np.array(values) * factor)
        for key, values in points.items()
    }


def to_points(x: Column, y: Column, limit: int = COLUMNS, gaps: bool = False) -> Points:
    """Make at most `limit` points: the median, smallest and largest value in bins of equal width.

    Args:
        x: in any order (N).
        y: (N) or (N x M): all M values of a row belong to its x; non-finite values are omitted.
        gaps: non-finite values interrupt the line; otherwise it connects the values around them.
    """
    y = y if y.ndim == 2 else y[:, None]
    known = np.isfinite(y).any(axis=1)
    if not gaps or not known.any():
        x, y = x[known], y[known]
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    if len(x) <= limit and y.shape[1] == 1:
        return {"x": _rounded(x), "y": _rounded(y[:, 0])}
    if len(x) > limit:
        width = (x[-1] - x[0]) / limit or 1.0
        number = np.minimum(((x - x[0]) / width).astype(np.int64), limit - 1)
        bins, starts = np.unique(number, return_index=True)
        x = x[0] + (bins + 0.5) * width
    else:
        starts = np.arange(len(x))
    stops = [*starts[1:], len(y)]
    pieces = [y[a:b][np.isfinite(y[a:b])] for a, b in zip(starts, stops, strict=True)]
    found = {"x": _rounded(x)}
    for key, of in (("y", np.median), ("low", np.min), ("high", np.max)):
        found[key] = _rounded(np.array([of(p) if len(p) else np.nan for p in pieces]))
    return found


def _rounded(values: Column) -> list[Any]:
    """Round to the digits that a chart shows; None for a value that overflowed."""
    return [float(f"{v:.7g}") if math.isfinite(v) else None for v in values.tolist()]


def clock(step: Column, seconds: Column, limit: int = 2 * COLUMNS) -> dict[str, list[float]]:
    """Seconds since the start of a run at some of its steps, for the page's time axis.

    Args:
        step, seconds: increasing (N).
    """
    # The steps around the longest pauses are kept, so that a restart is a step of the shown.
    pauses = np.argsort(np.diff(seconds))[-(limit // 4) :]
    even = np.linspace(0, len(step) - 1, min(len(step), limit // 2)).astype(np.int64)
    chosen = np.unique(np.concatenate([even, pauses, pauses + 1]))
    return {"step": _rounded(step[chosen]), "seconds": _rounded(seconds[chosen])}


def heat(step: Column, steps: Column, values: Column) -> Chart:
    """Cells from windows that end at `step` and span `steps` (L), with a value per rank (L x R).

    Returns:
        cells (rows x columns): the smallest value in each cell, in percent; None if there was none.
        left, right: edges of the first and the last column, in steps.
        per_row: number of ranks that share a row.
    """
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
    percent = [[round(c * 100) if np.isfinite(c) else None for c in row] for row in cells.tolist()]
    return {"cells": percent, "left": left, "right": right, "per_row": group}
