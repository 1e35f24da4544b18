"""The report pages: one self-contained HTML file each, with a summary at the top."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.audit.lineage import Redone
from hvdtrain.errors import UserError
from hvdtrain.report import units
from hvdtrain.report.metrics import Metrics, who
from hvdtrain.report.run import RecordedRun
from hvdtrain.text import plural

_INSTALL = (
    "hvdtrain report requires {name}, which is not installed: pip install 'hvdtrain[report]', or "
    "use --format json, which does not require it"
)


def one(run: RecordedRun, metrics: Metrics) -> str:
    """Render the page of a run.

    Raises:
        UserError: matplotlib or jinja2 is not installed.
    """
    template = _template("run.html")
    from hvdtrain.report import plots, tables

    return template.render(
        title=run.name,
        headline=headline(metrics),
        tiles=tiles(metrics),
        warnings=warnings(metrics),
        missing=run.missing,
        picture="\n".join(metrics["layout"]["picture"]) if metrics["layout"] else "",
        first=tables.first(metrics),
        last=tables.last(run, metrics),
        plots=plots.plots(run, metrics),
    )


def two(a: RecordedRun, b: RecordedRun, metrics: tuple[Metrics, Metrics]) -> str:
    """Render the page that compares two runs.

    Raises:
        UserError: as `one`.
    """
    template = _template("compare.html")
    from hvdtrain.report import compare

    sides = [
        (letter, run, headline(found))
        for letter, run, found in zip("AB", (a, b), metrics, strict=True)
    ]
    return template.render(
        title=f"{a.name} and {b.name}",
        sides=sides,
        tables=[compare.table(*metrics)],
        plots=compare.plots(a, b, metrics),
    )


def _template(name: str) -> Any:
    try:
        import jinja2
        import matplotlib  # noqa: F401 - reports its absence before any work is done
    except ModuleNotFoundError as error:
        raise UserError(_INSTALL.format(name=error.name)) from None
    loader = jinja2.PackageLoader("hvdtrain.report")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.get_template(name)


@dataclass(frozen=True)
class Tile:
    """One metric: label, value and a note."""

    label: str
    value: str
    note: str = ""


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
    return f"{metrics['steps']:,}{of} steps{epochs} in {took}{where}{again}. {how}"


def tiles(metrics: Metrics) -> list[Tile]:
    """The most important metrics at a glance."""
    communication = *_communication(metrics), *_layout(metrics["layout"])
    return [*_training(metrics), *communication, *_reliability(metrics)]


def _training(metrics: Metrics) -> list[Tile]:
    validation = metrics["final_validation_loss"]
    lowest, mfu = metrics["lowest_validation_loss"], metrics["median_mfu"]
    return [
        Tile(
            "Final loss",
            units.number(metrics["final_loss"]),
            f"validation {units.number(validation)}, lowest {units.number(lowest)}"
            + "".join(
                f", {name.replace('_', ' ')} {units.number(value)}"
                for name, value in metrics["final_validation"].items()
            )
            if validation is not None
            else "no validation",
        ),
        Tile(
            "Throughput",
            f"{units.number(metrics['median_samples_per_second'])} samples/s",
            "median step"
            + (f"; {units.percent(mfu)} of the peak FLOP/s (MFU)" if mfu is not None else ""),
        ),
        Tile("Step time", units.seconds(metrics["median_step_seconds"]), "median"),
    ]


def _communication(metrics: Metrics) -> list[Tile]:
    if metrics["phase_shares"] is None:
        return [Tile("Communication", units.UNKNOWN, "not recorded")]
    if metrics["overlap"] is None:
        return [Tile("Communication", "none", "one rank")]
    return [
        Tile(
            "Exposed communication",
            units.percent(metrics["exposed_share"]),
            "of the ranks' time; includes waiting for slow ranks",
        ),
        Tile("Overlap", units.percent(metrics["overlap"]), "1 - exposed / in-flight"),
        Tile(
            "Bus bandwidth",
            "≥ " + units.bandwidth(metrics["bus_bandwidth_bytes_per_second"]),
            "bytes × 2(n-1)/n / in-flight time, which is longer than the transfer",
        ),
    ]


def _layout(layout: Metrics | None) -> list[Tile]:
    if layout is None:
        return []
    waits = layout["wait_seconds_per_step"].items()
    waited = ", ".join(f"{axis} {units.seconds(seconds)}" for axis, seconds in waits)
    note = f"waits per rank and step: {waited}" if waited else ""
    tiles = [Tile("Layout", layout["picture"][0].partition(" = ")[2], note)]
    if layout["bubble_share"] is not None:
        formula = layout["bubble_formula_share"]
        expected = f"by (p-1)/(vm+p-1): {units.percent(formula)}" if formula else ""
        tiles.append(Tile("Pipeline bubble", units.percent(layout["bubble_share"]), expected))
    return tiles


def _reliability(metrics: Metrics) -> list[Tile]:
    return [
        _goodput(metrics),
        _restarts(metrics),
        _stragglers(metrics),
        _checkpoints(metrics),
        _memory(metrics),
    ]


def _goodput(metrics: Metrics) -> Tile:
    parts = metrics["seconds_by_part"]
    if parts is None:
        return Tile("Goodput", units.UNKNOWN, "no events")
    lost = {name: s for name, s in parts.items() if name != "steps" and s > 0}
    most = sorted(lost, key=lambda name: -lost[name])[:2]
    named = ", ".join(f"{name} {units.seconds(lost[name])}" for name in most)
    return Tile(
        "Goodput",
        units.percent(metrics["goodput_share"]),
        f"most time lost to: {named}" if named else "no time lost",
    )


def _restarts(metrics: Metrics) -> Tile:
    restarts = metrics["restarts"]
    if restarts is None:
        return Tile("Restarts", units.UNKNOWN, "no events")
    if not restarts:
        return Tile("Restarts", "0")
    cost = sum(restart["seconds_without_steps"] for restart in restarts)
    bounds = ("redone_steps", "redone_steps_at_most")
    redone = Redone(*(sum(restart[name] for restart in restarts) for name in bounds))
    return Tile(
        "Restarts",
        str(len(restarts)),
        f"{units.seconds(cost)} without steps, {redone.counted()} redone",
    )


def _stragglers(metrics: Metrics) -> Tile:
    named = metrics["stragglers"]
    if named:
        worst = named[0]
        count = len({rank for entry in named for rank in entry["ranks"]})
        return Tile("Slow ranks", str(count), f"longest: {who(worst)}, {worst['phase']}")
    if metrics["slowest_rank"] is None:
        several = metrics["phase_shares"] is None
        return Tile("Slow ranks", units.UNKNOWN, "not recorded" if several else "one rank")
    score = units.number(metrics["slowest_rank_median_score"], 2)
    return Tile("Slow ranks", "none", f"lowest median score {score}")


def _checkpoints(metrics: Metrics) -> Tile:
    count = metrics["checkpoints"]
    if count is None:
        return Tile("Checkpoints", units.UNKNOWN, "no events")
    notes = []
    if count:
        notes.append(f"last after step {metrics['last_checkpoint_step']:,}")
        notes.append(f"{units.seconds(metrics['median_checkpoint_seconds'])} to write (median)")
    if metrics["failed_checkpoints"]:
        notes.append(f"{metrics['failed_checkpoints']} FAILED")
    return Tile("Checkpoints", f"{count:,}", ", ".join(notes))


def _memory(metrics: Metrics) -> Tile:
    peak, rank = metrics["peak_host_memory_bytes"], metrics["peak_host_memory_rank"]
    if peak is None:
        return Tile("Peak memory", units.UNKNOWN, "not recorded")
    device = metrics["peak_device_memory_bytes"]
    note = f"resident, rank {rank}"
    if device is not None:
        note += f"; device {units.size(device)}, rank {metrics['peak_device_memory_rank']}"
    return Tile("Peak memory per rank", units.size(peak), note)


def warnings(metrics: Metrics) -> list[str]:
    """Problems that need attention, in addition to missing parts."""
    found = []
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
