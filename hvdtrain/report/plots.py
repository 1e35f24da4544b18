"""The plots of one run. Each states its result in the title, and is omitted without data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.ticker import NullFormatter

from hvdtrain.audit.ledger import MetricsLine
from hvdtrain.report import rank_plots, units
from hvdtrain.report.draw import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    Plot,
    canvas,
    legend,
    line,
    over_steps,
    restart_marks,
    sampling,
    thousands,
)
from hvdtrain.report.figures import Figures
from hvdtrain.report.run import Run

_POINTS = 2000  # per generation in the plot of its progress


def plots(run: Run, figures: Figures) -> list[Plot]:
    """Make all plots that a run has data for, in the order of the page."""
    makers: tuple[Callable[[Run, Figures], Plot | None], ...] = (
        _loss,
        _progress,
        _throughput,
        _step_time,
        rank_plots.phases,
        rank_plots.exposed,
        rank_plots.scores,
        rank_plots.memory,
    )
    return [plot for maker in makers if (plot := maker(run, figures)) is not None]


def _loss(run: Run, figures: Figures) -> Plot | None:
    step, loss = run.steps["step"], run.steps["loss"]
    with canvas(2.4, above=0.5) as (axes, svg):
        drawn = line(axes, step, loss, BLUE, "training loss")
        if drawn is None:
            return None
        line(axes, step, run.steps["validation_loss"], ORANGE, "validation loss")
        over_steps(axes, run, "loss", from_zero=False)
        legend(axes, 2)
    known = loss[np.isfinite(loss)]
    begin, end = (units.number(v) for v in (known[0], known[-1]))
    title = f"The training loss went from {begin} to {end}"
    if figures["final_validation_loss"] is not None:
        title += f", the last validation loss is {units.number(figures['final_validation_loss'])}"
    caption = "Mean loss of each step's global batch." + sampling(len(known), "loss")
    unknown = figures["steps_without_finite_loss"]
    if unknown:
        caption += f" Left out: {units.plural(unknown, 'step')} whose loss was not finite."
    return Plot(title, caption, svg[0])


def _progress(run: Run, figures: Figures) -> Plot | None:
    """Plot the step over the wall time: the line is flat where no step was done."""
    if run.ledger is None or not any(g.lines for g in run.ledger.generations):
        return None
    generations = run.ledger.generations
    begin = run.ledger.began
    scale, unit = _clock(figures["wall_seconds"])
    with canvas(2.0, above=0.5) as (axes, svg):
        for kept, colour, label in ((True, BLUE, "steps that count"), (False, RED, "taken back")):
            named: str | None = label
            pieces = [_some([li for li in g.lines if li.kept == kept]) for g in generations]
            for lines in filter(None, pieces):
                times = [(li.time - begin) / scale for li in lines]
                steps = [li.step for li in lines]
                axes.plot(times, steps, color=colour, label=named, linewidth=2.4)
                named = None  # one entry in the legend
        for number, restart in enumerate(figures["restarts"], start=1):
            before = generations[number - 1]
            stop = (before.lines[-1].time if before.lines else before.start.time) - begin
            until = stop + restart["seconds_without_steps"]
            axes.axvspan(stop / scale, until / scale, color=PURPLE, alpha=0.25, linewidth=0)
        span = max(figures["wall_seconds"], 1e-9) / scale
        axes.set_xlim(0, span)
        axes.set_ylim(bottom=0)
        starts = [(g.start.time - begin) / scale for g in generations[1:]]
        restart_marks(axes, starts, 0, span)
        thousands(axes.yaxis)
        axes.set_xlabel(f"{unit} since the first start")
        axes.set_ylabel("step")
        legend(axes, 2)
    count = len(figures["restarts"])
    title = f"{units.plural(figures['steps'], 'step')} in {units.seconds(figures['wall_seconds'])}"
    title += f" with {units.plural(count, 'restart')}" if count else " without a restart"
    caption = (
        "The restarts are numbered as in the table; shaded: no step was done." if count else ""
    )
    return Plot(title, caption, svg[0])


def _some(lines: list[MetricsLine]) -> list[MetricsLine]:
    """At most about _POINTS lines, including the last one: time and step only grow."""
    every = -(-len(lines) // _POINTS) or 1
    return lines[::every] + (lines[-1:] if (len(lines) - 1) % every else [])


def _clock(seconds: float) -> tuple[float, str]:
    for size, name in ((172800, "days"), (7200, "hours"), (180, "minutes")):
        if seconds > size:
            return {"days": 86400.0, "hours": 3600.0, "minutes": 60.0}[name], name
    return 1.0, "seconds"


def _throughput(run: Run, figures: Figures) -> Plot | None:
    step, speed = run.steps["step"], run.steps["samples_per_second"]
    with canvas(1.9) as (axes, svg):
        if line(axes, step, speed, GREEN) is None:
            return None
        over_steps(axes, run, "samples per second")
        thousands(axes.yaxis)
    median = units.number(figures["median_samples_per_second"])
    caption = "Samples of the global batch / time of the step." + sampling(len(step), "value")
    return Plot(f"Throughput: {median} samples/s in the median step", caption, svg[0])


def _step_time(run: Run, figures: Figures) -> Plot | None:
    step, seconds = run.steps["step"], run.steps["step_seconds"] * 1e3
    with canvas(1.9) as (axes, svg):
        drawn = line(axes, step, seconds, BLUE)
        if drawn is None:
            return None
        wide = drawn.high.max() > 10 * np.median(drawn.middle) and drawn.low.min() > 0
        if wide:
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(NullFormatter())
        thousands(axes.yaxis)
        over_steps(axes, run, "ms per step" + (" (logarithmic)" if wide else ""))
    known = seconds[np.isfinite(seconds)]
    typical, tail, worst = np.median(known), np.percentile(known, 99), known.max()
    title = (
        f"A step takes {units.seconds(typical / 1e3)} (median), 99% take less than "
        f"{units.seconds(tail / 1e3)}, the longest took {units.seconds(worst / 1e3)}"
    )
    caption = "Wall time of a step without evaluation and checkpoint." + sampling(len(step), "time")
    return Plot(title, caption, svg[0])
