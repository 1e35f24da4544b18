"""The figures of a run in words: a sentence, tiles, and tables."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hvdtrain.audit.goodput import PARTS
from hvdtrain.report import units
from hvdtrain.report.figures import Figures
from hvdtrain.report.run import Run

_ROWS = 20
_CAUSES: dict[str, str] = {
    "launch": "the program was started again",
    "failure": "a rank failed",
    "hosts": "processes came or went",
}


@dataclass(frozen=True)
class Tile:
    """One figure: what, how much, and what has to be known with it."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Cells as text.

    Args:
        head: of the columns; empty: without one
        note: what was left out
        words: so many columns, from the left, are words and not figures
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""
    words: int = 1


def headline(figures: Figures) -> str:
    """One sentence: how far it came, with what, how it ended."""
    hosts, ranks = len(figures["hosts"]), figures["ranks"]
    of = f" of {figures['total_steps']:,}" if figures["total_steps"] else ""
    where = f" on {units.plural(ranks, 'rank')}, {units.plural(hosts, 'host')}" if ranks else ""
    took = units.seconds(figures["wall_seconds"])
    how = {
        None: "It is not known how it ended.",
        "no end": "No end was recorded: it was killed, or it still runs.",
        "finished": "It finished.",
        "preempted": "It was asked to stop, wrote a checkpoint and can go on from it.",
    }.get(figures["state"], f"It {figures['state']}.")
    restarts = figures["restarts"]
    again = f", with {units.plural(len(restarts), 'restart')}" if restarts else ""
    return f"{figures['steps']:,}{of} steps in {took}{where}{again}. {how}"


def tiles(figures: Figures) -> list[Tile]:
    """What a person wants to know in a minute."""
    return [*_training(figures), *_communication(figures), *_reliability(figures)]


def _training(figures: Figures) -> list[Tile]:
    validation = figures["final_validation_loss"]
    lowest = figures["lowest_validation_loss"]
    return [
        Tile(
            "Final loss",
            units.number(figures["final_loss"]),
            f"validation {units.number(validation)}, lowest {units.number(lowest)}"
            if validation is not None
            else "never validated",
        ),
        Tile(
            "Throughput",
            f"{units.number(figures['median_samples_per_second'])} samples/s",
            "median step",
        ),
        Tile("Step time", units.seconds(figures["median_step_seconds"]), "median"),
    ]


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
    again = sum(restart["redone_steps"] for restart in restarts)
    return Tile(
        "Restarts",
        str(len(restarts)),
        f"{units.seconds(cost)} without steps, {units.plural(again, 'step')} done again",
    )


def _stragglers(figures: Figures) -> Tile:
    named = figures["stragglers"]
    if named:
        worst = named[0]
        note = f"longest: rank {worst['rank']} on {worst['host']}, {worst['phase']}"
        return Tile("Slow ranks", str(len({entry["rank"] for entry in named})), note)
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
    """What has to be looked at, beside what is missing."""
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


def first_tables(figures: Figures) -> list[Table]:
    """Restarts and slow ranks; empty tables are left out."""
    return [t for t in (_restart_table(figures), _straggler_table(figures)) if t.rows]


def last_tables(run: Run, figures: Figures) -> list[Table]:
    """What the time went to, and facts; empty tables are left out."""
    return [t for t in (_lost(figures), _phases(figures), _facts(run, figures)) if t.rows]


def _restart_table(figures: Figures) -> Table:
    restarts = figures["restarts"] or []
    rows = [
        [
            str(restart["number"]),
            _cause(restart),
            f"{restart['step']:,}",
            f"{restart['ranks_before']} → {restart['ranks_after']}",
            units.seconds(restart["seconds_without_steps"]),
            f"{restart['redone_steps']:,}",
        ]
        for restart in restarts
    ]
    costly = sorted(restarts, key=lambda r: -r["seconds_without_steps"])[:_ROWS]
    shown = {restart["number"] for restart in costly}
    left = f"The {_ROWS} costliest of {len(rows)}." if len(rows) > _ROWS else ""
    head = ["restart", "cause", "after step", "ranks", "without steps", "steps done again"]
    return Table("Restarts", head, [row for row in rows if int(row[0]) in shown], left, 2)


def _cause(restart: Figures) -> str:
    cause = _CAUSES.get(str(restart["cause"]), str(restart["cause"]))
    for what, name in (("lost", "hosts_lost"), ("gained", "hosts_gained")):
        if restart[name]:
            cause += f", {what} {' '.join(restart[name])}"
    return f"{cause} (state from {restart['source']})"


def _straggler_table(figures: Figures) -> Table:
    named = figures["stragglers"]
    rows = [
        [
            f"{entry['rank']} on {entry['host']}",
            entry["phase"],
            str(entry["times"]),
            f"{entry['first_step']:,}",
            f"{entry['steps']:,}",
            units.number(entry["lowest_score"], 2),
        ]
        for entry in named[:_ROWS]
    ]
    left = f"The {_ROWS} that lasted longest of {len(named)}." if len(named) > _ROWS else ""
    head = ["rank", "slow in", "times named", "first at step", "steps", "lowest score"]
    return Table("Ranks that were named as slow", head, rows, left, 2)


def _lost(figures: Figures) -> Table:
    parts, wall = figures["seconds_by_part"] or {}, figures["wall_seconds"] or 0.0
    rows = [
        [PARTS[name], units.seconds(seconds), units.percent(seconds / wall if wall else 0.0)]
        for name, seconds in parts.items()
        if seconds > 0
    ]
    return Table("Goodput: what the wall time went to", ["", "time", "share"], rows)


def _phases(figures: Figures) -> Table:
    shares, each = figures["phase_shares"] or {}, figures["phase_seconds_per_step"] or {}
    rows = [[p, units.seconds(each[p]), units.percent(share)] for p, share in shares.items()]
    return Table("Phases, mean of all ranks", ["phase", "time per step", "share"], rows)


def _facts(run: Run, figures: Figures) -> Table:
    manifest = run.manifest
    batch = run.config.get("batch", {})
    horovod = manifest.get("horovod") or {}
    begin = run.ledger.generations[0].start.time if run.ledger else None
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(begin)) if begin else None
    hosts = ", ".join(f"{h}: {units.ranks(r)}" for h, r in list(figures["hosts"].items())[:_ROWS])
    facts = {
        "task": figures["task"],
        "began": began,
        "ranks by host": hosts + (" …" if len(figures["hosts"]) > _ROWS else ""),
        "device": manifest.get("device"),
        "controller": horovod.get("controller"),
        "samples in a step": batch.get("global_size"),
        "seed": manifest.get("seed"),
        "git commit": manifest.get("git_commit"),
        **manifest.get("versions", {}),
    }
    return Table("The run", [], [[k, str(v)] for k, v in facts.items() if v], words=2)
