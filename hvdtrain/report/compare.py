"""Comparison of two runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.ticker import MaxNLocator

from hvdtrain.report import units
from hvdtrain.report.draw import (
    BLUE,
    GREY,
    ORANGE,
    PHASE_COLORS,
    Plot,
    canvas,
    legend,
    line,
    sampling,
    thousands,
)
from hvdtrain.report.metrics import COMPARED, Metrics, per_step, phases, ratios
from hvdtrain.report.run import RecordedRun
from hvdtrain.report.tables import ReportTable

# Label and format of each metric of `COMPARED`.
_FORMATS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "steps": ("steps", units.number),
    "ranks": ("ranks", units.number),
    "final_loss": ("final loss", units.number),
    "final_validation_loss": ("final validation loss", units.number),
    "lowest_validation_loss": ("lowest validation loss", units.number),
    "median_samples_per_second": ("samples per second, median", units.number),
    "median_step_seconds": ("step time, median", units.seconds),
    "exposed_share": ("exposed communication, share", units.percent),
    "overlap": ("overlap", units.percent),
    "bus_bandwidth_bytes_per_second": ("bus bandwidth, at least", units.bandwidth),
    "slowest_rank_median_score": ("lowest median straggler score", units.number),
    "goodput_share": ("goodput", units.percent),
    "wall_seconds": ("wall time", units.seconds),
    "median_checkpoint_seconds": ("time to write a checkpoint, median", units.seconds),
    "peak_host_memory_bytes": ("peak host memory per rank", units.size),
    "peak_device_memory_bytes": ("peak device memory per rank", units.size),
}


def table(a: Metrics, b: Metrics) -> ReportTable:
    """Table of the metrics of both runs and their ratios."""
    found = ratios(a, b)
    rows = []
    for name in COMPARED:
        label, text = _FORMATS[name]
        if a[name] is not None or b[name] is not None:
            rows.append([label, text(a[name]), text(b[name]), _times(found[name])])
    for phase in phases(a, b):
        values = per_step(a, phase), per_step(b, phase)
        ratio = _times(found[f"{phase}_seconds_per_step"])
        rows.append([f"{phase}, per step", *map(units.seconds, values), ratio])
    for name, label in (("restarts", "restarts"), ("stragglers", "slow ranks reported")):
        counts = [units.UNKNOWN if f[name] is None else str(len(f[name])) for f in (a, b)]
        rows.append([label, *counts, ""])
    return ReportTable("Metrics", ["", "A", "B", "B / A"], rows)


def plots(a: RecordedRun, b: RecordedRun, metrics: tuple[Metrics, Metrics]) -> list[Plot]:
    """Plot loss, validation loss and throughput over steps, and the phases, of both runs."""
    found = [
        _overlay(a, b, "loss", "loss", "Training loss"),
        _overlay(a, b, "validation_loss", "loss", "Validation loss"),
        _overlay(a, b, "samples_per_second", "samples per second", "Throughput"),
        _phase_bars(metrics),
    ]
    return [plot for plot in found if plot is not None]


def _overlay(a: RecordedRun, b: RecordedRun, name: str, ylabel: str, title: str) -> Plot | None:
    with canvas(2.4, above=0.4) as (axes, svg):
        drawn = [
            line(axes, run.steps["step"], run.steps[name], color, f"{letter}: {run.name}")
            for run, letter, color in ((a, "A", BLUE), (b, "B", ORANGE))
        ]
        if drawn == [None, None]:
            return None
        axes.set_xlim(left=0)
        thousands(axes.xaxis)
        thousands(axes.yaxis)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("step")
        axes.set_ylabel(ylabel)
        if name == "samples_per_second":
            axes.set_ylim(bottom=0)
        legend(axes, 2)
    missing = [letter for letter, band in zip("AB", drawn, strict=True) if band is None]
    caption = f"Unknown for {missing[0]}." if missing else ""
    points = max(len(run.steps["step"]) for run in (a, b))
    if name != "validation_loss":
        caption += sampling(points, "value")
    return Plot(f"{title} of both runs", caption, svg[0])


def _phase_bars(metrics: tuple[Metrics, Metrics]) -> Plot | None:
    a, b = metrics
    if a["phase_seconds_per_step"] is None and b["phase_seconds_per_step"] is None:
        return None
    with canvas(0.9, above=0.4) as (axes, svg):
        left = [0.0, 0.0]
        for phase in phases(a, b):
            widths = [(per_step(f, phase) or 0.0) * 1e3 for f in metrics]
            color = PHASE_COLORS.get(phase, GREY)
            axes.barh(["A", "B"], widths, left=left, color=color, label=phase)
            left = [x + width for x, width in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set_xlabel("ms/step")
        axes.set_ylabel("run")
        legend(axes, 8)
    caption = "Mean of all ranks and steps; the phases of a rank add up to its wall time."
    return Plot("Time per phase in both runs", caption, svg[0])


def _times(ratio: float | None) -> str:
    return units.UNKNOWN if ratio is None else f"{ratio:.3g}"
