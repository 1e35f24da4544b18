"""The metrics of a run in words: a sentence, tiles and warnings."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.audit.lineage import Redone
from hvdtrain.report import units
from hvdtrain.report.figures import Figures, who


@dataclass(frozen=True)
class Tile:
    """One metric: label, value and a note."""

    label: str
    value: str
    note: str = ""


def headline(figures: Figures) -> str:
    """One sentence: the progress of the run, its ranks, and how it ended."""
    hosts, ranks = len(figures["hosts"]), figures["ranks"]
    of = f" of {figures['total_steps']:,}" if figures["total_steps"] else ""
    epochs = f" ({figures['epochs']:.2f} epochs)" if figures["epochs"] is not None else ""
    where = f" on {units.plural(ranks, 'rank')}, {units.plural(hosts, 'host')}" if ranks else ""
    took = units.seconds(figures["wall_seconds"])
    how = {
        None: "It is not known how it ended.",
        "no end": "No end was recorded: it was killed, or it still runs.",
        "finished": "It finished.",
        "stopped early": "It stopped early: the validation loss became no lower (train.patience).",
        "preempted": "It was asked to stop, wrote a checkpoint and can resume from it.",
    }.get(figures["state"], f"It {figures['state']}.")
    restarts = figures["restarts"]
    again = f", with {units.plural(len(restarts), 'restart')}" if restarts else ""
    return f"{figures['steps']:,}{of} steps{epochs} in {took}{where}{again}. {how}"


def tiles(figures: Figures) -> list[Tile]:
    """The most important metrics at a glance."""
    communication = *_communication(figures), *_layout(figures["layout"])
    return [*_training(figures), *communication, *_reliability(figures)]


def _training(figures: Figures) -> list[Tile]:
    validation = figures["final_validation_loss"]
    lowest = figures["lowest_validation_loss"]
    return [
        Tile(
            "Final loss",
            units.number(figures["final_loss"]),
            f"validation {units.number(validation)}, lowest {units.number(lowest)}"
            + "".join(
                f", {name.replace('_', ' ')} {units.number(value)}"
                for name, value in figures["final_validation"].items()
            )
            if validation is not None
            else "never validated",
        ),
        Tile(
            "Throughput",
            f"{units.number(figures['median_samples_per_second'])} samples/s",
            "median step" + _utilisation(figures["median_mfu"]),
        ),
        Tile("Step time", units.seconds(figures["median_step_seconds"]), "median"),
    ]


def _utilisation(mfu: float | None) -> str:
    return "" if mfu is None else f"; {units.percent(mfu)} of the peak FLOP/s (MFU)"


def _communication(figures: Figures) -> list[Tile]:
    if figures["phase_shares"] is None:
        return [Tile("Communication", units.UNKNOWN, "not recorded")]
    if figures["overlap"] is None:
        return [Tile("Communication", "none", "one rank")]
    return [
        Tile(
            "Exposed communication",
            units.percent(figures["exposed_share"]),
            "of the ranks' time; includes waiting for slow ranks",
        ),
        Tile("Overlap", units.percent(figures["overlap"]), "1 - exposed / in-flight"),
        Tile(
            "Bus bandwidth",
            "≥ " + units.bandwidth(figures["bus_bandwidth_bytes_per_second"]),
            "bytes × 2(n-1)/n / in-flight time, which is longer than the transfer",
        ),
    ]


def _layout(layout: Figures | None) -> list[Tile]:
    if layout is None:
        return []
    waits = layout["wait_seconds_per_step"].items()
    waited = ", ".join(f"{axis} {units.seconds(seconds)}" for axis, seconds in waits)
    note = f"waits of a rank in a step: {waited}" if waited else ""
    tiles = [Tile("Layout", layout["picture"][0].partition(" = ")[2], note)]
    if layout["bubble_share"] is not None:
        formula = layout["bubble_formula_share"]
        expected = f"by (p-1)/(vm+p-1): {units.percent(formula)}" if formula else ""
        tiles.append(Tile("Pipeline bubble", units.percent(layout["bubble_share"]), expected))
    return tiles


def _reliability(figures: Figures) -> list[Tile]:
    return [
        _goodput(figures),
        _restarts(figures),
        _stragglers(figures),
        _checkpoints(figures),
        _memory(figures),
    ]


def _goodput(figures: Figures) -> Tile:
    parts = figures["seconds_by_part"]
    if parts is None:
        return Tile("Goodput", units.UNKNOWN, "no events")
    lost = {name: s for name, s in parts.items() if name != "steps" and s > 0}
    most = sorted(lost, key=lambda name: -lost[name])[:2]
    named = ", ".join(f"{name} {units.seconds(lost[name])}" for name in most)
    return Tile(
        "Goodput",
        units.percent(figures["goodput_share"]),
        f"most lost to: {named}" if named else "nothing lost",
    )


def _restarts(figures: Figures) -> Tile:
    restarts = figures["restarts"]
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


def _stragglers(figures: Figures) -> Tile:
    named = figures["stragglers"]
    if named:
        worst = named[0]
        count = len({rank for entry in named for rank in entry["ranks"]})
        return Tile("Slow ranks", str(count), f"longest: {who(worst)}, {worst['phase']}")
    if figures["slowest_rank"] is None:
        several = figures["phase_shares"] is None
        return Tile("Slow ranks", units.UNKNOWN, "not recorded" if several else "one rank")
    score = units.number(figures["slowest_rank_median_score"], 2)
    return Tile("Slow ranks", "none named", f"lowest median score {score}")


def _checkpoints(figures: Figures) -> Tile:
    count = figures["checkpoints"]
    if count is None:
        return Tile("Checkpoints", units.UNKNOWN, "no events")
    notes = []
    if count:
        notes.append(f"last of step {figures['last_checkpoint_step']:,}")
        notes.append(f"{units.seconds(figures['median_checkpoint_seconds'])} to write (median)")
    if figures["failed_checkpoints"]:
        notes.append(f"{figures['failed_checkpoints']} FAILED")
    return Tile("Checkpoints", f"{count:,}", ", ".join(notes))


def _memory(figures: Figures) -> Tile:
    peak, rank = figures["peak_host_memory_bytes"], figures["peak_host_memory_rank"]
    if peak is None:
        return Tile("Peak memory", units.UNKNOWN, "not recorded")
    device = figures["peak_device_memory_bytes"]
    note = f"resident, rank {rank}"
    if device is not None:
        note += f"; device {units.size(device)}, rank {figures['peak_device_memory_rank']}"
    return Tile("Peak memory of a rank", units.size(peak), note)


def warnings(figures: Figures) -> list[str]:
    """Problems that need attention, in addition to missing parts."""
    found = []
    if figures["steps_without_finite_loss"]:
        count = units.plural(figures["steps_without_finite_loss"], "step")
        found.append(f"{count} had a loss that is not finite.")
    if figures["skipped_steps"]:
        count = units.plural(figures["skipped_steps"], "step")
        found.append(f"{count} changed nothing: the gradient was not finite.")
    if figures["healed_ranks"]:
        count = units.plural(figures["healed_ranks"], "time")
        found.append(f"{count} a rank's state differed from the others' and was healed.")
    if figures["failed_checkpoints"]:
        count = units.plural(figures["failed_checkpoints"], "checkpoint")
        found.append(f"{count} could not be written.")
    return found
