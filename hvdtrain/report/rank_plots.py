"""The plots of a run that compare its ranks."""

from __future__ import annotations

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

from hvdtrain.report import units
from hvdtrain.report.bins import heat
from hvdtrain.report.draw import (
    BLUE,
    GREY,
    ORANGE,
    PHASE_COLOURS,
    RED,
    Plot,
    canvas,
    legend,
    line,
    over_steps,
    scale_above,
)
from hvdtrain.report.figures import Figures, who
from hvdtrain.report.run import Column, Run

_BARS = 128


def phases(run: Run, figures: Figures) -> Plot | None:
    """Plot stacked bars of the phases, one for each rank."""
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


def exposed(run: Run, figures: Figures) -> Plot | None:
    """Plot the fraction of exposed communication over the steps."""
    ranks = run.ranks
    if ranks is None or figures["overlap"] is None:
        return None
    share = 100 * ranks.of("comm_exposed") / _positive(ranks.totals)
    with canvas(1.9) as (axes, svg):
        if line(axes, ranks.step, share, RED) is None:
            return None
        over_steps(axes, run, "exposed communication,\n% of the rank's time")
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


def scores(run: Run, figures: Figures) -> Plot | None:
    """Plot straggler scores, ranks x steps: the darker, the slower the rank."""
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
        over_steps(axes, run, "rank", from_zero=False)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(False)
        threshold = run.config.get("telemetry", {}).get("straggler_threshold")
        scale_above(axes, ScalarMappable(scale, "YlOrRd_r"), "straggler score", threshold)
    return Plot(_score_title(figures), _score_caption(cells.ranks_per_row), svg[0])


def _score_title(figures: Figures) -> str:
    named = figures["stragglers"]
    if named:
        worst, count = named[0], len({rank for entry in named for rank in entry["ranks"]})
        longest = f"{who(worst)} in {worst['phase']}"
        if count == 1:
            return f"One rank was named as slow: {longest}"
        return f"{count} ranks were named as slow; longest {longest}"
    rank, score = figures["slowest_rank"], units.number(figures["slowest_rank_median_score"], 2)
    return f"No rank was named as slow; the lowest median score is rank {rank}'s, {score}"


def _score_caption(group: int) -> str:
    shared = f" {group} ranks share a row, the slowest of them is shown." if group > 1 else ""
    return (
        "Straggler score: smallest compute time of all ranks with the same work / the rank's own, "
        "so 1 is the fastest. Each cell shows the lowest score in it; empty: no such rank then. "
        "The line in the scale: a rank below it again and again is named. After a restart a "
        f"number may belong to another process.{shared}"
    )


def memory(run: Run, figures: Figures) -> Plot | None:
    """Plot the memory of a rank over the steps."""
    ranks = run.ranks
    if ranks is None or figures["peak_host_memory_bytes"] is None:
        return None
    gib = 2.0**30
    with canvas(1.9, above=0.5) as (axes, svg):
        line(axes, ranks.step, ranks.figures["host_memory_bytes"] / gib, BLUE, "host, resident")
        if figures["peak_device_memory_bytes"] is not None:
            device = ranks.figures["device_memory_bytes"] / gib
            line(axes, ranks.step, device, ORANGE, "device, allocated")
        over_steps(axes, run, "GiB per rank")
        legend(axes, 2)
    title = f"A rank uses up to {units.size(figures['peak_host_memory_bytes'])} of host memory"
    if figures["peak_device_memory_bytes"] is not None:
        title += f" and {units.size(figures['peak_device_memory_bytes'])} of device memory"
    caption = (
        "As it was when the ranks compared their times. Line: median over the ranks; band: "
        "smallest to largest."
    )
    return Plot(title, caption, svg[0])
