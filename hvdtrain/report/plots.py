"""The plots of one run. Each says in its title what is seen, and is left out without figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

from hvdtrain.audit.ledger import Line
from hvdtrain.report import units
from hvdtrain.report.bins import heat
from hvdtrain.report.draw import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PHASE_COLOURS,
    PURPLE,
    RED,
    canvas,
    legend,
    line,
    restart_marks,
    sampling,
    scale_above,
    thousands,
)
from hvdtrain.report.figures import Figures
from hvdtrain.report.run import Column, Run

_POINTS = 2000  # of a generation in the plot of its progress
_BARS = 128


@dataclass(frozen=True)
class Plot:
    """Title, a caption with the definitions, and the picture."""

    title: str
    caption: str
    svg: str


def plots(run: Run, figures: Figures) -> list[Plot]:
    """All that can be drawn of a run, in the order of the page."""
    makers: tuple[Callable[[Run, Figures], Plot | None], ...] = (
        _loss,
        _progress,
        _throughput,
        _step_time,
        _phases,
        _exposed,
        _scores,
        _memory,
    )
    return [plot for maker in makers if (plot := maker(run, figures)) is not None]


def _over_steps(axes: Axes, run: Run, ylabel: str, from_zero: bool = True) -> None:
    """What all plots over steps share: the same range, and the restarts."""
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


def _loss(run: Run, figures: Figures) -> Plot | None:
    step, loss = run.steps["step"], run.steps["loss"]
    with canvas(2.4, above=0.5) as (axes, svg):
        drawn = line(axes, step, loss, BLUE, "training loss")
        if drawn is None:
            return None
        line(axes, step, run.steps["validation_loss"], ORANGE, "validation loss")
        _over_steps(axes, run, "loss", from_zero=False)
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
    """Step over the wall time: where it is flat, no step was done."""
    if run.ledger is None or not any(g.lines for g in run.ledger.generations):
        return None
    generations = run.ledger.generations
    begin = generations[0].start.time
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


def _some(lines: list[Line]) -> list[Line]:
    """At most about _POINTS of the lines, the last one among them: time and step only grow."""
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
        _over_steps(axes, run, "samples per second")
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
        _over_steps(axes, run, "ms per step" + (" (logarithmic)" if wide else ""))
    known = seconds[np.isfinite(seconds)]
    typical, tail, worst = np.median(known), np.percentile(known, 99), known.max()
    title = (
        f"A step takes {units.seconds(typical / 1e3)} (median), 99% take less than "
        f"{units.seconds(tail / 1e3)}, the longest took {units.seconds(worst / 1e3)}"
    )
    caption = "Wall time of a step without evaluation and checkpoint." + sampling(len(step), "time")
    return Plot(title, caption, svg[0])


def _phases(run: Run, figures: Figures) -> Plot | None:
    """Stacked bars, one a rank."""
    ranks = run.ranks
    shares = figures["phase_shares"]
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
            colour = PHASE_COLOURS.get(phase, GREY)
            axes.bar(starts, height, group * 0.8, below, align="center", color=colour, label=phase)
            below += height
        axes.set_xlim(-0.6 * group, starts[-1] + 0.6 * group)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(False, axis="x")
        axes.set_xlabel("rank" if group == 1 else f"first of {group} ranks (their mean)")
        axes.set_ylabel("ms per step")
        legend(axes, len(ranks.phases))
    most = sorted(shares, key=lambda phase: -shares[phase])[:2]
    named = " and ".join(f"{phase} {units.percent(shares[phase])}" for phase in most)
    caption = (
        "Mean over the run; the phases of a rank are disjoint and add up to its wall time. "
        "comm_exposed: what a step waits for after its last backward pass. A straggler computes "
        "longest and waits least."
    )
    return Plot(f"Where the time of each rank goes: most of it {named}", caption, svg[0])


def _exposed(run: Run, figures: Figures) -> Plot | None:
    ranks = run.ranks
    if ranks is None or figures["overlap"] is None:
        return None
    share = 100 * ranks.of("comm_exposed") / _positive(ranks.totals)
    with canvas(1.9) as (axes, svg):
        if line(axes, ranks.step, share, RED) is None:
            return None
        _over_steps(axes, run, "exposed communication,\n% of the rank's time")
        axes.set_ylim(0, 100)
    title = (
        f"{units.percent(figures['exposed_share'])} of the time is exposed communication; "
        f"{units.percent(figures['overlap'])} of the communication is hidden behind compute"
    )
    caption = (
        "Line: median over the ranks; band: from the rank that waits least to the one that waits "
        "most. Overlap: 1 - exposed / in-flight."
    )
    return Plot(title, caption, svg[0])


def _positive(values: Column) -> Column:
    found: Column = np.where(values > 0, values, np.nan)
    return found


def _scores(run: Run, figures: Figures) -> Plot | None:
    """Ranks x steps; the darker, the slower the rank."""
    ranks, slowest = run.ranks, figures["slowest_rank"]
    if ranks is None or slowest is None:
        return None
    cells = heat(ranks.step, ranks.steps, ranks.figures["score"])
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
        _over_steps(axes, run, "rank", from_zero=False)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(False)
        threshold = run.config.get("telemetry", {}).get("straggler_threshold")
        scale_above(axes, ScalarMappable(scale, "YlOrRd_r"), "straggler score", threshold)
    return Plot(_score_title(figures), _score_caption(cells.ranks_per_row), svg[0])


def _score_title(figures: Figures) -> str:
    named = figures["stragglers"]
    if named:
        worst, count = named[0], len({entry["rank"] for entry in named})
        who = f"rank {worst['rank']} on {worst['host']} in {worst['phase']}"
        if count == 1:
            return f"One rank was named as slow: {who}"
        return f"{count} ranks were named as slow; longest {who}"
    rank, score = figures["slowest_rank"], units.number(figures["slowest_rank_median_score"], 2)
    return f"No rank was named as slow; the lowest median score is rank {rank}'s, {score}"


def _score_caption(group: int) -> str:
    shared = f" {group} ranks share a row, the slowest of them is shown." if group > 1 else ""
    return (
        "Straggler score: smallest compute time of all ranks / the rank's own, so 1 is the "
        "fastest. Each cell shows the lowest score in it; empty: no such rank then. The line in "
        "the scale: a rank below it again and again is named. After a restart a number may "
        f"belong to another process.{shared}"
    )


def _memory(run: Run, figures: Figures) -> Plot | None:
    ranks = run.ranks
    if ranks is None or figures["peak_host_memory_bytes"] is None:
        return None
    gib = 2.0**30
    with canvas(1.9, above=0.5) as (axes, svg):
        line(axes, ranks.step, ranks.figures["host_memory_bytes"] / gib, BLUE, "host, resident")
        if figures["peak_device_memory_bytes"] is not None:
            device = ranks.figures["device_memory_bytes"] / gib
            line(axes, ranks.step, device, ORANGE, "device, allocated")
        _over_steps(axes, run, "GiB per rank")
        legend(axes, 2)
    title = f"A rank uses up to {units.size(figures['peak_host_memory_bytes'])} of host memory"
    if figures["peak_device_memory_bytes"] is not None:
        title += f" and {units.size(figures['peak_device_memory_bytes'])} of device memory"
    caption = (
        "As it was when the ranks compared their times. Line: median over the ranks; band: "
        "smallest to largest."
    )
    return Plot(title, caption, svg[0])
