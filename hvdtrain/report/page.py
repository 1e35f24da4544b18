"""The report pages as JSON, which static/page.js shows: at the top a summary."""

from __future__ import annotations

from typing import Any

from hvdtrain.audit.lineage import Redone
from hvdtrain.report import charts, run_charts, tables, texts, units
from hvdtrain.report.metrics import COMPARED, Metrics, ratios
from hvdtrain.report.run import RecordedRun
from hvdtrain.text import plural

# Parts of the goodput, as a tile names them.
_PARTS = {"start": "start-up", "restart": "start-up after restarts", "down": "not running"}
# Tiles of a comparison.
_COMPARED = {
    "final_loss": "Final loss, A → B",
    "lowest_validation_loss": "Lowest validation loss",
    "median_samples_per_second": "Samples per second, median",
    "exposed_share": "Exposed communication",
    "goodput_share": "Goodput",
    "wall_seconds": "Wall time",
}
Page = dict[str, Any]
Tile = dict[str, str]


def one(run: RecordedRun, metrics: Metrics) -> Page:
    """Make the page of a run."""
    layout = metrics["layout"]
    picture = [text("Layout", "\n".join(layout["picture"]), open=True)] if layout else []
    return page(
        title=run.name,
        headline=headline(metrics),
        tiles=tiles(metrics),
        notes=[note(line, True) for line in warnings(metrics)] + [*map(note, run.missing)],
        clocks=[run_charts.clock(run)],
        marks=run_charts.marks(metrics),
        first=tables.first(metrics),
        charts=run_charts.make(run, metrics),
        last=tables.last(run, metrics),
        texts=picture + texts.of_run(run.path),
    )


def two(a: RecordedRun, b: RecordedRun, metrics: tuple[Metrics, Metrics]) -> Page:
    """Make the page that compares two runs."""
    sides = [*zip("AB", (a, b), metrics, strict=True)]
    notes = [note(f"{letter}: {line}") for letter, run, _ in sides for line in run.missing]
    return page(
        title=f"{a.name} and {b.name}",
        headline="\n".join(f"{letter}  {run.path}: {headline(m)}" for letter, run, m in sides),
        tiles=_compared(*metrics),
        notes=notes,
        clocks=[run_charts.clock(run) for run in (a, b)],
        charts=charts.of_runs({letter: run_charts.points(run) for letter, run, _ in sides}),
        first=[
            texts.differences({letter: texts.configuration(run.path) for letter, run, _ in sides})
        ],
        last=tables.both(*metrics),
    )


def page(title: str, **parts: Any) -> Page:
    """Make a page; all text in it is plain text.

    Args:
        parts: headline: lines. state: of a live run, and mood: "good", "bad" or "". links: (text,
            address). tiles, notes. clocks: per run the seconds since its start at some steps.
            marks: restarts. charts. first, last: tables above and below the charts. texts: below
            them, folded.
    """
    parts |= {name: [vars(table) for table in parts.get(name, [])] for name in ("first", "last")}
    empty: dict[str, Any] = {"headline": "", "state": "", "mood": "", "texts": []}
    empty |= {name: [] for name in ("links", "tiles", "notes", "clocks", "marks", "charts")}
    return {"title": title, **empty, **parts}


def tile(label: str, value: str, below: str = "") -> Tile:
    """One metric: label, value and what is below it."""
    return {"label": label, "value": value, "note": below}


def note(line: str, warning: bool = False) -> dict[str, Any]:
    return {"text": line, "warning": warning}


def text(title: str, content: str, open: bool = False) -> dict[str, Any]:
    return {"title": title, "text": content, "open": open}


def headline(metrics: Metrics) -> str:
    """One sentence: the progress of the run, its ranks, and how it ended."""
    hosts, ranks = len(metrics["hosts"]), metrics["ranks"]
    of = f" of {metrics['total_steps']:,}" if metrics["total_steps"] else ""
    epochs = f" ({metrics['epochs']:.2f} epochs)" if metrics["epochs"] is not None else ""
    where = f" on {plural(ranks, 'rank')}, {plural(hosts, 'host')}" if ranks else ""
    took = units.seconds(metrics["wall_seconds"])
    how = {
        None: "How it ended is unknown.",
        "no end": "No end was recorded: the run was killed, or it is still running.",
        "finished": "It finished.",
        "stopped early": "It stopped early: the validation loss did not improve (train.patience).",
        "preempted": "It was preempted, wrote a checkpoint and can resume from it.",
    }.get(metrics["state"], f"It {metrics['state']}.")
    restarts = metrics["restarts"]
    again = f", with {plural(len(restarts), 'restart')}" if restarts else ""
    total = metrics["total_steps"] or metrics["steps"]
    step = "step" if total == 1 else "steps"
    return f"{metrics['steps']:,}{of} {step}{epochs} in {took}{where}{again}. {how}"


def tiles(metrics: Metrics) -> list[Tile]:
    """The most important metrics at a glance."""
    return [
        _steps(metrics),
        _loss(metrics),
        _throughput(metrics),
        _communication(metrics),
        _goodput(metrics),
        _restarts(metrics),
        *_borrowed(metrics),
    ]


def _compared(a: Metrics, b: Metrics) -> list[Tile]:
    """The most important metrics of two runs, and by how much B differs from A."""
    found = ratios(a, b)
    shown = []
    for name, label in _COMPARED.items():
        text = COMPARED[name][1]
        if a[name] is None and b[name] is None:
            continue
        ratio = None if name.endswith("_share") else found[name]
        below = "" if ratio is None else "equal" if ratio == 1 else f"{ratio - 1:+.1%}"
        values = [text(m[name]) for m in (a, b)]
        if name == "exposed_share":
            values = [_communication(m)["value"] for m in (a, b)]
            below = "one rank" if values == ["none", "none"] else ""
        shown.append(tile(label, " → ".join(values), below))
    return shown


def _steps(metrics: Metrics) -> Tile:
    of = f" of {metrics['total_steps']:,}" if metrics["total_steps"] else ""
    left = metrics["remaining_seconds"]
    below = f"{units.seconds(left)} left" if left is not None else metrics["state"] or ""
    return tile("Steps", f"{metrics['steps']:,}{of}", below)


def _loss(metrics: Metrics) -> Tile:
    validation, lowest = (metrics[f"{which}_validation_loss"] for which in ("final", "lowest"))
    below = f"validation {units.number(validation)}, lowest {units.number(lowest)}"
    final = units.number(metrics["final_loss"])
    return tile("Final loss", final, "no validation" if validation is None else below)


def _throughput(metrics: Metrics) -> Tile:
    label, mfu = "Throughput, median", metrics["median_mfu"]
    if metrics["median_samples_per_second"] is None:
        return tile(label, units.UNKNOWN, "no steps")
    below = f"{units.seconds(metrics['median_step_seconds'])} per step"
    below += f", {units.percent(mfu)} of the peak FLOP/s" if mfu is not None else ""
    speed = units.number(metrics["median_samples_per_second"])
    return tile(label, f"{speed} samples/s", below)


def _communication(metrics: Metrics) -> Tile:
    label = "Exposed communication"
    if metrics["phase_shares"] is None:
        return tile(label, units.UNKNOWN, "not recorded")
    if metrics["overlap"] is None:
        return tile(label, "none", "one rank")
    share = units.percent(metrics["exposed_share"])
    return tile(label, share, "of the ranks' time, with waiting for slow ranks")


def _goodput(metrics: Metrics) -> Tile:
    parts = metrics["seconds_by_part"]
    if parts is None:
        return tile("Goodput", units.UNKNOWN, "no events")
    lost = {name: s for name, s in parts.items() if name != "steps" and s > 0}
    most = sorted(lost, key=lambda name: -lost[name])[:2]
    named = ", ".join(f"{_PARTS.get(name, name)} {units.seconds(lost[name])}" for name in most)
    share = units.percent(metrics["goodput_share"])
    return tile("Goodput", share, f"lost: {named}" if named else "no time lost")


def _restarts(metrics: Metrics) -> Tile:
    restarts = metrics["restarts"]
    if restarts is None:
        return tile("Restarts", units.UNKNOWN, "no events")
    if not restarts:
        return tile("Restarts", "0")
    cost = sum(restart["seconds_without_steps"] for restart in restarts)
    bounds = ("redone_steps", "redone_steps_at_most")
    redone = Redone(*(sum(restart[name] for restart in restarts) for name in bounds))
    below = f"{units.seconds(cost)} without steps, {redone.counted()} redone"
    return tile("Restarts", str(len(restarts)), below)


def _borrowed(metrics: Metrics) -> list[Tile]:
    found = metrics["borrowed"]
    if found is None:
        return []
    used, idle = found["used_node_seconds"], found["idle_node_seconds"]
    lost = f"{plural(found['lost_steps'], 'step')} lost"
    below = f"of {units.number(used + idle)}; {lost}"
    if (changes := found["changes_per_hour"]) is not None:
        below += f", {units.number(changes)} changes per hour"
    return [tile("Borrowed node-seconds used", units.number(used), below)]


def warnings(metrics: Metrics) -> list[str]:
    """Problems that need attention, in addition to missing parts."""
    found = []
    if metrics["stragglers"]:
        found.append(f"{run_charts.slow_ranks(metrics)}.")
    if metrics["steps_without_finite_loss"]:
        count = plural(metrics["steps_without_finite_loss"], "step")
        found.append(f"{count} had a non-finite loss.")
    if metrics["skipped_steps"]:
        count = plural(metrics["skipped_steps"], "step")
        found.append(f"{count} skipped because the gradient was not finite.")
    if metrics["spike_steps"]:
        count = plural(len(metrics["spike_steps"]), "step")
        found.append(f"{count} skipped because of a loss spike.")
    if metrics["rollbacks"]:
        count = plural(metrics["rollbacks"], "time")
        found.append(f"{count} the run returned to a checkpoint because of a loss spike.")
    if metrics["healed_ranks"]:
        count = plural(metrics["healed_ranks"], "time")
        found.append(
            f"{count} a rank's state differed from the other ranks' state and was replaced."
        )
    if metrics["failed_checkpoints"]:
        count = plural(metrics["failed_checkpoints"], "checkpoint")
        found.append(f"{count} could not be written.")
    return found
