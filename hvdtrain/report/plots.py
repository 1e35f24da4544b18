"""The plots of one run. Each states its result in the title, and is omitted without data."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator, NullFormatter

from hvdtrain.audit.ledger import MetricsLine
from hvdtrain.report import units
from hvdtrain.report.draw import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PHASE_COLORS,
    PURPLE,
    RED,
    Plot,
    canvas,
    heat,
    legend,
    line,
    over_steps,
    restart_marks,
    sampling,
    scale_above,
    thousands,
)
from hvdtrain.report.metrics import Metrics, who
from hvdtrain.report.run import Column, RecordedRun
from hvdtrain.telemetry.config import STRAGGLER_THRESHOLD
from hvdtrain.text import plural

_POINTS = 2000  # per generation in the plot of its progress
_BARS = 128


def plots(run: RecordedRun, metrics: Metrics) -> list[Plot]:
    """Make all plots that a run has data for, in the order of the page."""
    makers: tuple[Callable[[RecordedRun, Metrics], Plot | None], ...] = (
        _loss,
        _source_losses,
        _progress,
        _throughput,
        _step_time,
        _phases,
        _exposed,
        _scores,
        _memory,
    )
    return [plot for maker in makers if (plot := maker(run, metrics)) is not None]


def _loss(run: RecordedRun, metrics: Metrics) -> Plot | None:
    step, loss = run.steps["step"], run.steps["loss"]
    with canvas(2.4, above=0.5) as (axes, svg):
        drawn = line(axes, step, loss, BLUE, "training loss")
        if drawn is None:
            return None
        line(axes, step, run.steps["validation_loss"], ORANGE, "validation loss")
        spikes = np.isin(step, metrics["spike_steps"] or []) & np.isfinite(loss)
        if spikes.any():
            axes.plot(step[spikes], loss[spikes], "v", color=RED, label="skipped: loss spike")
        over_steps(axes, run, "loss", from_zero=False)
        legend(axes, 3)
    known = loss[np.isfinite(loss)]
    begin, end = (units.number(v) for v in (known[0], known[-1]))
    title = f"The training loss went from {begin} to {end}"
    if metrics["final_validation_loss"] is not None:
        title += f", the last validation loss is {units.number(metrics['final_validation_loss'])}"
    caption = "Mean loss of each step's global batch." + sampling(len(known), "loss")
    unknown = metrics["steps_without_finite_loss"]
    if unknown:
        caption += f" Omitted: {plural(unknown, 'step')} with a non-finite loss."
    return Plot(title, caption, svg[0])


def _source_losses(run: RecordedRun, metrics: Metrics) -> Plot | None:
    sources = [s for s in metrics["sources"] or [] if s["final_loss"] is not None]
    if not sources:
        return None
    with canvas(2.4, above=0.5) as (axes, svg):
        for source, color in zip(sources, cycle(PHASE_COLORS.values()), strict=False):
            name = source["name"]
            line(axes, run.steps["step"], run.steps[f"loss_{name}"], color, name)
        over_steps(axes, run, "loss", from_zero=False)
        legend(axes, 4)
    last = ", ".join(f"{s['name']} {units.number(s['final_loss'])}" for s in sources)
    caption = "Training loss of each source of the mixture, mean over its samples in a step."
    return Plot(f"The last losses of the sources are {last}", caption, svg[0])


def _progress(run: RecordedRun, metrics: Metrics) -> Plot | None:
    """Plot the step over the wall time: the line is flat where no step was done."""
    if run.ledger is None or not any(g.lines for g in run.ledger.generations):
        return None
    generations = run.ledger.generations
    begin = run.ledger.began
    scale, unit = _clock(metrics["wall_seconds"])
    with canvas(2.0, above=0.5) as (axes, svg):
        for kept, color, label in ((True, BLUE, "steps that count"), (False, RED, "rolled back")):
            named: str | None = label
            pieces = [_some([li for li in g.lines if li.kept == kept]) for g in generations]
            for lines in filter(None, pieces):
                times = [(li.time - begin) / scale for li in lines]
                steps = [li.step for li in lines]
                axes.plot(times, steps, color=color, label=named, linewidth=2.4)
                named = None  # one entry in the legend
        for number, restart in enumerate(metrics["restarts"], start=1):
            before = generations[number - 1]
            stop = (before.lines[-1].time if before.lines else before.start.time) - begin
            until = stop + restart["seconds_without_steps"]
            axes.axvspan(stop / scale, until / scale, color=PURPLE, alpha=0.25, linewidth=0)
        span = max(metrics["wall_seconds"], 1e-9) / scale
        axes.set_xlim(0, span)
        axes.set_ylim(bottom=0)
        starts = [(g.start.time - begin) / scale for g in generations[1:]]
        restart_marks(axes, starts, 0, span)
        thousands(axes.yaxis)
        axes.set_xlabel(f"{unit} since the first start")
        axes.set_ylabel("step")
        legend(axes, 2)
    count = len(metrics["restarts"])
    title = f"{plural(metrics['steps'], 'step')} in {units.seconds(metrics['wall_seconds'])}"
    title += f" with {plural(count, 'restart')}" if count else " without restarts"
    caption = "Restarts are numbered as in the table; shaded: no step ran." if count else ""
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


def _throughput(run: RecordedRun, metrics: Metrics) -> Plot | None:
    step, speed = run.steps["step"], run.steps["samples_per_second"]
    with canvas(1.9) as (axes, svg):
        if line(axes, step, speed, GREEN) is None:
            return None
        over_steps(axes, run, "samples per second")
        thousands(axes.yaxis)
    median = units.number(metrics["median_samples_per_second"])
    caption = "Global batch size / step time." + sampling(len(step), "value")
    return Plot(f"Throughput: {median} samples/s in the median step", caption, svg[0])


def _step_time(run: RecordedRun, metrics: Metrics) -> Plot | None:
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
        over_steps(axes, run, "ms/step" + (" (logarithmic)" if wide else ""))
    known = seconds[np.isfinite(seconds)]
    typical, tail, worst = np.median(known), np.percentile(known, 99), known.max()
    title = (
        f"Step time: median {units.seconds(typical / 1e3)}, 99th percentile "
        f"{units.seconds(tail / 1e3)}, maximum {units.seconds(worst / 1e3)}"
    )
    caption = "Wall time per step, without evaluation and checkpoint." + sampling(len(step), "time")
    return Plot(title, caption, svg[0])


def _phases(run: RecordedRun, metrics: Metrics) -> Plot | None:
    """Plot stacked bars of the phases, one for each rank."""
    ranks = run.ranks
    shares = metrics["phase_shares"]
    if ranks is None or shares is None:
        return None
    present = np.isfinite(ranks.totals)
    steps = (present * ranks.steps[:, None]).sum(axis=0)
    per_rank = np.nansum(ranks.seconds, axis=1, dtype=np.float64) / np.maximum(steps, 1) * 1e3
    group = -(-per_rank.shape[1] // _BARS)
    starts = np.arange(0, per_rank.shape[1], group)
    sizes = np.diff([*starts, per_rank.shape[1]])
    bars = np.add.reduceat(per_rank, starts, axis=1) / sizes
    with canvas(2.5, above=0.35) as (axes, svg):
        below = np.zeros(len(starts))
        for phase, height in zip(ranks.phases, bars, strict=True):
            color = PHASE_COLORS.get(phase, GREY)
            axes.bar(starts, height, group * 0.8, below, align="center", color=color, label=phase)
            below += height
        axes.set_xlim(-0.6 * group, starts[-1] + 0.6 * group)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(False, axis="x")
        axes.set_xlabel("rank" if group == 1 else f"first of {group} ranks (their mean)")
        axes.set_ylabel("ms/step")
        legend(axes, len(ranks.phases))
    most = sorted(shares, key=lambda phase: -shares[phase])[:2]
    named = " and ".join(f"{phase} {units.percent(shares[phase])}" for phase in most)
    caption = (
        "Mean over the run; the phases of a rank are disjoint and add up to its wall time. "
        "comm_exposed: the wait for communication after the last backward pass. A straggler "
        "computes longest and waits least."
    )
    return Plot(f"Time per rank and phase; most time: {named}", caption, svg[0])


def _exposed(run: RecordedRun, metrics: Metrics) -> Plot | None:
    """Plot the fraction of exposed communication over the steps."""
    ranks = run.ranks
    if ranks is None or metrics["overlap"] is None:
        return None
    share = 100 * ranks.of("comm_exposed") / _positive(ranks.totals)
    with canvas(1.9) as (axes, svg):
        if line(axes, ranks.step, share, RED) is None:
            return None
        over_steps(axes, run, "exposed communication,\n% of the rank's time")
        axes.set_ylim(0, 100)
    title = (
        f"{units.percent(metrics['exposed_share'])} of the time is exposed communication; "
        f"{units.percent(metrics['overlap'])} of the communication is hidden behind compute"
    )
    caption = (
        "Line: median over the ranks; band: from the rank that waits least to the one that waits "
        "most. Overlap: 1 - exposed / in-flight."
    )
    return Plot(title, caption, svg[0])


def _positive(values: Column) -> Column:
    found: Column = np.where(values > 0, values, np.nan)
    return found


def _scores(run: RecordedRun, metrics: Metrics) -> Plot | None:
    """Plot straggler scores, ranks x steps: the darker, the slower the rank."""
    ranks, slowest = run.ranks, metrics["slowest_rank"]
    if ranks is None or slowest is None:
        return None
    cells = heat(ranks.step, ranks.steps, ranks.metrics["score"])
    rows = cells.cells.shape[0]
    with canvas(min(5.0, 0.8 + 0.12 * max(rows, 6)), above=0.65) as (axes, svg):
        scale = Normalize(0, 1)
        axes.imshow(
            cells.cells,
            aspect="auto",
            interpolation="nearest",
            cmap="YlOrRd_r",
            norm=scale,
            extent=(cells.left, cells.right, rows * cells.ranks_per_row - 0.5, -0.5),
        )
        over_steps(axes, run, "rank", from_zero=False)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(False)
        mappable = ScalarMappable(scale, "YlOrRd_r")
        scale_above(axes, mappable, "straggler score", STRAGGLER_THRESHOLD)
    return Plot(_score_title(metrics), _score_caption(cells.ranks_per_row), svg[0])


def _score_title(metrics: Metrics) -> str:
    named = metrics["stragglers"]
    if named:
        worst, count = named[0], len({rank for entry in named for rank in entry["ranks"]})
        longest = f"{who(worst)} in {worst['phase']}"
        if count == 1:
            return f"One rank was slow: {longest}"
        return f"{count} ranks were slow; longest: {longest}"
    rank, score = metrics["slowest_rank"], units.number(metrics["slowest_rank_median_score"], 2)
    return f"No rank was slow; lowest median score: {score} (rank {rank})"


def _score_caption(group: int) -> str:
    shared = f" {group} ranks share a row, the slowest of them is shown." if group > 1 else ""
    return (
        "Straggler score: smallest compute time of all ranks with the same work / the rank's own, "
        "so 1 is the fastest. Each cell shows its lowest score; empty: no such rank. "
        "Line in the scale: a rank that stays below it is reported as slow. After a restart a "
        f"rank may be another process.{shared}"
    )


def _memory(run: RecordedRun, metrics: Metrics) -> Plot | None:
    """Plot the memory of a rank over the steps."""
    ranks = run.ranks
    if ranks is None or metrics["peak_host_memory_bytes"] is None:
        return None
    gib = 2.0**30
    with canvas(1.9, above=0.5) as (axes, svg):
        line(axes, ranks.step, ranks.metrics["host_memory_bytes"] / gib, BLUE, "host, resident")
        if metrics["peak_device_memory_bytes"] is not None:
            device = ranks.metrics["device_memory_bytes"] / gib
            line(axes, ranks.step, device, ORANGE, "device, allocated")
        over_steps(axes, run, "GiB per rank")
        legend(axes, 2)
    title = f"A rank uses up to {units.size(metrics['peak_host_memory_bytes'])} of host memory"
    if metrics["peak_device_memory_bytes"] is not None:
        title += f" and {units.size(metrics['peak_device_memory_bytes'])} of device memory"
    caption = (
        "Sampled when the ranks compared their times. Line: median over the ranks; band: "
        "smallest to largest."
    )
    return Plot(title, caption, svg[0])
