"""Drawing of plots: small SVG in the page's text color, so that it is legible in dark mode."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hvdtrain.report.run import Column, RecordedRun

COLUMNS = 500
ROWS = 128
# Placeholder for the page's text color, which only the page knows.
INK = "#010203"
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = (
    "#3b82c4",
    "#e0812b",
    "#3f9e5a",
    "#d9453d",
    "#a06bd0",
    "#8a8a8a",
)
PHASE_COLORS = {
    "data": "#d4a017",
    "forward": "#3b82c4",
    "backward": "#7db3e0",
    "comm_exposed": "#d9453d",
    "optimizer": "#3f9e5a",
    "eval": "#a06bd0",
    "checkpoint": "#8c6d5a",
    "other": "#8a8a8a",
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # the name of a run may contain a dollar sign
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "path.simplify": True,
}
# Page margins in inches, fixed so that the step axes of stacked plots align.
_WIDTH, _LEFT, _RIGHT, _BOTTOM = 10.0, 1.0, 0.35, 0.5


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


@dataclass(frozen=True)
class Plot:
    """Title, a caption with the definitions, and the picture."""

    title: str
    caption: str
    svg: str


@contextmanager
def canvas(height: float, above: float = 0.25) -> Iterator[tuple[Axes, list[str]]]:
    """Axes to draw on; the SVG is in the list when the context ends.

    Args:
        height: height of the axes, in inches.
        above: space for a legend or the restarts' numbers, in inches.
    """
    svg: list[str] = []
    whole = height + above + _BOTTOM
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": "hvdtrain"}):
        figure = Figure(figsize=(_WIDTH, whole))
        width = 1 - (_LEFT + _RIGHT) / _WIDTH
        axes = figure.add_axes((_LEFT / _WIDTH, _BOTTOM / whole, width, height / whole))
        axes.yaxis.set_label_coords(-0.072, 0.5)
        yield axes, svg
        svg.append(_svg(figure))


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, dpi=100, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # IDs of several pictures on one page would clash
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'role="img"', svg, count=1)


def line(axes: Axes, x: Column, y: Column, color: str, label: str | None = None) -> Band | None:
    """Draw the median of each bin as a line over the band of all values; None if there are none."""
    found = band(x, y)
    if not len(found.x):
        return None
    marker = "o" if len(found.x) < 40 else None
    axes.plot(found.x, found.middle, color=color, label=label, marker=marker, markersize=3)
    if not found.exact:
        axes.fill_between(found.x, found.low, found.high, color=color, alpha=0.25, linewidth=0)
    return found


def over_steps(axes: Axes, run: RecordedRun, ylabel: str, from_zero: bool = True) -> None:
    """Set up what all plots over steps share: the range and the restarts."""
    last = max(
        run.steps["step"][-1] if len(run.steps["step"]) else 0,
        run.ranks.step[-1] if run.ranks else 0,
    )
    first = run.ledger.generations[0].start.step if run.ledger else 0
    axes.set_xlim(first, max(last, first + 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    thousands(axes.xaxis)
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    if from_zero and axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    if run.ledger:
        places = [float(g.start.step) for g in run.ledger.generations[1:]]
        restart_marks(axes, places, first, max(last, first + 1))


def legend(axes: Axes, columns: int) -> None:
    """Draw the legend above the plot, where it hides nothing."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1, 1, 0),
        ncols=columns,
        borderaxespad=1.6,  # above the numbers of the restarts
        borderpad=0,
        fontsize=9,
    )


def scale_above(axes: Axes, scale: ScalarMappable, label: str, mark: float | None) -> None:
    """Draw a color scale above the right end of the plot, with a line at `mark`."""
    figure, place = axes.get_figure(root=True), axes.get_position()
    assert figure is not None
    inch = 1 / figure.get_figheight()
    bar = figure.add_axes((place.x1 - 0.27, place.y1 + 0.25 * inch, 0.27, 0.12 * inch))
    figure.colorbar(scale, cax=bar, orientation="horizontal", ticklocation="top")
    bar.grid(False)
    bar.tick_params(labelsize=9)
    bar.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
    if mark is not None:
        bar.axvline(mark, color="black", linewidth=2)


def restart_marks(axes: Axes, places: list[float], low: float, high: float) -> None:
    """Draw a dashed line at each restart, numbered as in the table; close ones share a label."""
    groups: list[tuple[float, list[int]]] = []
    for number, place in enumerate(places, start=1):
        axes.axvline(place, color=PURPLE, linestyle=(0, (4, 3)), linewidth=1.1, zorder=5)
        if groups and place - groups[-1][0] < 0.04 * (high - low):
            groups[-1][1].append(number)
        else:
            groups.append((place, [number]))
    for place, numbers in groups:
        axes.annotate(
            str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}",
            (place, 1.0),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            color=PURPLE,
            fontsize=9,
            fontweight="bold",
        )


def thousands(axis: Axis) -> None:
    """Format ticks such as 12,500; small numbers keep their form."""
    axis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def sampling(points: int, what: str) -> str:
    """Caption text about points that share a bin."""
    if points <= COLUMNS:
        return ""
    return f" Line: median of each of {COLUMNS} equal stretches; band: smallest to largest {what}."
