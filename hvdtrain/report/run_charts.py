"""The charts of one recorded run. Each states its result in a note, and is omitted without data."""

from __future__ import annotations

from itertools import cycle

import numpy as np

from hvdtrain.report import charts, units
from hvdtrain.report.charts import COLUMNS, Chart, Points, to_points
from hvdtrain.report.metrics import Metrics, who
from hvdtrain.report.run import Column, RecordedRun
from hvdtrain.text import plural

_GIB = 2.0**30
_OVER_RANKS = "Line: median over the ranks; band: smallest to largest."
_RANKS = 64  # in the chart of the phases: the ranks with the lowest scores


def make(run: RecordedRun, metrics: Metrics) -> list[Chart]:
    """Make all charts that a run has data for, in the order of the page."""
    found = charts.of_run(points(run))
    if "loss" in found:
        _describe_loss(found["loss"], run, metrics)
    if "step_seconds" in found:
        _describe_step_time(found["step_seconds"], run)
    for key, result in _results(run, metrics).items():
        if key in found:
            found[key]["note"] = result
    if "exposed" in found:
        found["exposed"]["caption"] = _OVER_RANKS
    loss = found.pop("loss", None)
    every = [
        loss,
        _source_losses(run, metrics),
        *found.values(),
        _memory(run, metrics),
        _phases(run, metrics),
        _scores(run, metrics),
    ]
    return [chart for chart in every if chart is not None]


def points(run: RecordedRun) -> dict[str, Points]:
    """Return the points of the metrics in `charts.STEP_METRICS`."""
    step = run.steps["step"]
    found = {
        name: to_points(step, run.steps[name], gaps=name in charts.DENSE)
        for name in charts.STEP_METRICS
        if name in run.steps
    }
    ranks = run.ranks
    if ranks is not None and ranks.world_size.max() > 1:
        totals = np.where(ranks.totals > 0, ranks.totals, np.nan)
        found["exposed"] = to_points(ranks.step, ranks.of("comm_exposed") / totals)
    return found


def clock(run: RecordedRun) -> dict[str, list[float]]:
    """Seconds since the first start, by step."""
    step, time = run.steps["step"], run.steps["time"]
    known = np.isfinite(time)
    step, time = step[known], np.maximum.accumulate(time[known])
    began = run.ledger.began if run.ledger else time[0] if len(time) else 0.0
    return charts.clock(step, time - began)


def marks(metrics: Metrics) -> list[dict[str, float]]:
    """Return the number, step and time of each restart; see `metrics.restarts`."""
    keys = ("number", "step", "at_seconds")
    return [{key: restart[key] for key in keys} for restart in metrics["restarts"] or []]


def _describe_loss(chart: Chart, run: RecordedRun, metrics: Metrics) -> None:
    step, loss = run.steps["step"], run.steps["loss"]
    known = loss[np.isfinite(loss)]
    spikes = np.isin(step, metrics["spike_steps"] or []) & np.isfinite(loss)
    skipped = charts.series(
        "skipped: loss spike", to_points(step[spikes], loss[spikes]), charts.RED
    )
    chart["series"] += [skipped | {"dots": True}] if spikes.any() else []
    if len(known):
        begin, end = (units.number(value) for value in (known[0], known[-1]))
        chart["note"] = f"The training loss went from {begin} to {end}"
        if len(known) == 1:
            chart["note"] = f"The training loss is {end}"
        if metrics["final_validation_loss"] is not None:
            last = units.number(metrics["final_validation_loss"])
            chart["note"] += f", the last validation loss is {last}"
    if len(step) > COLUMNS:
        chart["caption"] = f"Line: median of each of {COLUMNS} equal stretches; band: all values."
    if unknown := metrics["steps_without_finite_loss"]:
        omitted = f"Omitted: {plural(unknown, 'step')} with a non-finite loss."
        chart["caption"] = f"{chart.get('caption', '')} {omitted}".strip()


def _results(run: RecordedRun, metrics: Metrics) -> dict[str, str]:
    """Results of the charts with one sentence each."""
    found = {}
    if metrics["median_samples_per_second"] is not None:
        found["samples_per_second"] = f"Median {units.number(metrics['median_samples_per_second'])}"
    if metrics["overlap"] is not None:
        share, overlap = (units.percent(metrics[key]) for key in ("exposed_share", "overlap"))
        found["exposed"] = f"{share} of the time; {overlap} of the communication is hidden"
    for key in ("grad_norm", "lr"):
        known = run.steps[key][np.isfinite(run.steps[key])]
        if len(known):
            most, last = units.number(known.max(), 3), units.number(known[-1], 3)
            found[key] = f"Maximum {most}, last {last}"
    return found


def _describe_step_time(chart: Chart, run: RecordedRun) -> None:
    seconds = run.steps["step_seconds"]
    known = seconds[np.isfinite(seconds)]
    typical, tail, worst = (float(np.percentile(known, share)) for share in (50, 99, 100))
    chart["note"] = (
        f"Median {units.seconds(typical)}, 99th percentile {units.seconds(tail)}, "
        f"maximum {units.seconds(worst)}"
    )


def _source_losses(run: RecordedRun, metrics: Metrics) -> Chart | None:
    sources = [s for s in metrics["sources"] or [] if s["final_loss"] is not None]
    if not sources:
        return None
    drawn = [
        charts.series(
            name, to_points(run.steps["step"], run.steps[f"loss_{name}"]), color, noisy=True
        )
        for name, color in zip((s["name"] for s in sources), cycle(charts.PALETTE), strict=False)
    ]
    last = ", ".join(f"{s['name']} {units.number(s['final_loss'])}" for s in sources)
    note = f"The last losses of the sources are {last}"
    return charts.lines("Loss of each source of the mixture", "", drawn, note=note, wide=True)


def _phases(run: RecordedRun, metrics: Metrics) -> Chart | None:
    """Stacked bars of the phases, one for each rank."""
    ranks, shares = run.ranks, metrics["phase_shares"]
    if ranks is None or shares is None:
        return None
    steps = (np.isfinite(ranks.totals) * ranks.steps[:, None]).sum(axis=0)
    per_rank = np.nansum(ranks.seconds, axis=1, dtype=np.float64) / np.maximum(steps, 1)
    shown = np.arange(per_rank.shape[1])
    if len(shown) > _RANKS:
        score = np.nan_to_num(ranks.metrics["score"], nan=np.inf).min(axis=0)
        shown = np.sort(np.argsort(score, kind="stable")[:_RANKS])
    seconds = dict(zip(ranks.phases, per_rank[:, shown].tolist(), strict=True))
    labels = [f"{rank} {run.host(rank)}" for rank in shown.tolist()]
    chart = charts.phases("Time per rank and phase", seconds, labels)
    most = sorted(shares, key=lambda phase: -shares[phase])[:2]
    chart["note"] = "Most time: " + ", ".join(f"{p} {units.percent(shares[p])}" for p in most)
    chart["caption"] = (
        "Mean over the run; the phases of a rank add up to its wall time. comm_exposed: the wait "
        "for communication after the last backward pass."
    )
    if len(shown) < per_rank.shape[1]:
        chart["caption"] += f" The {_RANKS} slowest of {per_rank.shape[1]} ranks."
    return chart


def _scores(run: RecordedRun, metrics: Metrics) -> Chart | None:
    """Straggler scores, ranks x steps; folded if no rank was reported as slow."""
    ranks, slowest = run.ranks, metrics["slowest_rank"]
    if ranks is None or slowest is None:
        return None
    cells = charts.heat(ranks.step, ranks.steps, ranks.metrics["score"])
    caption = (
        "Score: smallest compute time of all ranks with the same work / the rank's own, so 1 is "
        "the fastest. A cell has its lowest score; after a restart a rank may be another process."
    )
    if cells["per_row"] > 1:
        caption += f" {cells['per_row']} ranks share a row, the slowest of them is shown."
    return {
        **{"title": "Straggler score of each rank", "unit": "rank", "note": slow_ranks(metrics)},
        **{"caption": caption, "folded": not metrics["stragglers"], "wide": True, **cells},
    }


def slow_ranks(metrics: Metrics) -> str:
    """One sentence, without a period, on the ranks that were slow."""
    named = metrics["stragglers"]
    if named:
        worst, count = named[0], len({rank for entry in named for rank in entry["ranks"]})
        longest = f"{who(worst)} in {worst['phase']}"
        if count == 1:
            return f"One rank was slow: {longest}"
        return f"{count} ranks were slow; longest: {longest}"
    rank, score = metrics["slowest_rank"], units.number(metrics["slowest_rank_median_score"], 2)
    return f"No rank was slow; lowest median score: {score} (rank {rank})"


def _memory(run: RecordedRun, metrics: Metrics) -> Chart | None:
    """Memory of a rank over the steps."""
    if run.ranks is None:
        return None
    drawn = []
    for kind, color in (("host", charts.BLUE), ("device", charts.ORANGE)):
        values: Column = run.ranks.metrics[f"{kind}_memory_bytes"]
        found = to_points(run.ranks.step, values / _GIB) if np.nanmax(values, initial=0) else None
        drawn.append(charts.series(kind, found, color))
    chart = charts.lines("Memory per rank", "GiB", drawn, zero=True)
    peaks = [(kind, metrics[f"peak_{kind}_memory_bytes"]) for kind in ("host", "device")]
    chart["note"] = "Up to " + ", ".join(f"{units.size(p)} ({kind})" for kind, p in peaks if p)
    chart["caption"] = _OVER_RANKS if run.ranks.world_size.max() > 1 else ""
    return chart if chart["series"] else None
