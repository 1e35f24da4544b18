"""The metrics of a run as tables."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hvdtrain.audit.goodput import PARTS
from hvdtrain.audit.lineage import Redone
from hvdtrain.report import units
from hvdtrain.report.metrics import COMPARED, Metrics, per_step, phases, ratios, who
from hvdtrain.report.run import RecordedRun

_ROWS = 20
_SHARDS = 64  # ranks of a layout
_NAMED = 12  # ranks in a row; if there are more, only their number is shown
_CAUSES: dict[str, str] = {
    "launch": "the program was restarted",
    "failure": "a rank failed",
    "hosts": "processes joined or left",
    "spike": "a loss spike",
}


@dataclass(frozen=True)
class ReportTable:
    """Cells as text.

    Args:
        head: column heads; empty: no heads
        note: what was omitted
        words: number of columns, from the left, that are words and not numbers
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""
    words: int = 1


def first(metrics: Metrics) -> list[ReportTable]:
    """Tables of sources, shards, restarts, slow ranks, assignments; empty tables are omitted."""
    slow = _straggler_table(metrics), _assignment_table(metrics)
    every = _sources(metrics), _shards(metrics), _restart_table(metrics), *slow
    return [t for t in every if t.rows]


def last(run: RecordedRun, metrics: Metrics) -> list[ReportTable]:
    """Tables of the time spent and of facts; empty tables are omitted."""
    spent = _lost(metrics), _phases(metrics), _collectives(metrics)
    every = _all_metrics(metrics), *spent, _facts(run, metrics)
    return [t for t in every if t.rows]


def both(a: Metrics, b: Metrics) -> list[ReportTable]:
    """Tables of the metrics and phases of two runs, with their ratios."""
    found = ratios(a, b)
    rows, spent = [], []
    for name, (label, text) in COMPARED.items():
        if a[name] is not None or b[name] is not None:
            rows.append([label, text(a[name]), text(b[name]), _times(found[name])])
    for phase in phases(a, b):
        values = per_step(a, phase), per_step(b, phase)
        ratio = _times(found[f"{phase}_seconds_per_step"])
        spent.append([phase, *map(units.seconds, values), ratio])
    for name, label in (("restarts", "restarts"), ("stragglers", "slow ranks reported")):
        counts = [units.UNKNOWN if f[name] is None else str(len(f[name])) for f in (a, b)]
        rows.append([label, *counts, units.UNKNOWN])
    head = ["A", "B", "B\u00a0/\u00a0A"]
    every = (
        ReportTable("Metrics", ["", *head], rows),
        ReportTable("Time per step, mean of all ranks", ["phase", *head], spent),
    )
    return [table for table in every if table.rows]


def _times(ratio: float | None) -> str:
    return units.UNKNOWN if ratio is None else f"{ratio:.3g}"


def _all_metrics(metrics: Metrics) -> ReportTable:
    rows = [
        [label, text(metrics[name])]
        for name, (label, text) in COMPARED.items()
        if metrics[name] is not None
    ]
    for name, value in metrics["final_validation"].items():
        rows.append([f"final validation {name.replace('_', ' ')}", units.number(value)])
    if metrics["checkpoints"]:
        last = f"{metrics['checkpoints']:,}, last after step {metrics['last_checkpoint_step']:,}"
        rows.append(["checkpoints", last])
    if layout := metrics["layout"]:
        for axis, seconds in layout["wait_seconds_per_step"].items():
            rows.append([f"wait on axis {axis}, per rank and step", units.seconds(seconds)])
        if layout["bubble_share"] is not None:
            rows.append(["pipeline bubble", units.percent(layout["bubble_share"])])
            equal = layout["bubble_formula_share"]
            rows.append(["pipeline bubble, if all stages were equally fast", units.percent(equal)])
    return ReportTable("Metrics", [], rows)


def _sources(metrics: Metrics) -> ReportTable:
    """Table of the sources of a mixture."""
    rows = [
        [
            source["name"],
            f"{source['samples']:,}",
            units.percent(source["share"]),
            units.number(source["epochs"], 3),
            units.number(source["final_loss"]),
            units.number(source["final_validation_loss"]),
        ]
        for source in metrics["sources"] or []
    ]
    head = ["source", "samples", "share", "epochs", "last loss", "last validation loss"]
    return ReportTable("Sources of the mixture", head, rows)


def _restart_table(metrics: Metrics) -> ReportTable:
    restarts = metrics["restarts"] or []
    rows = [
        [
            str(restart["number"]),
            cause(restart),
            f"{restart['step']:,}",
            f"{restart['ranks_before']} → {restart['ranks_after']}",
            units.seconds(restart["seconds_without_steps"]),
            str(Redone(restart["redone_steps"], restart["redone_steps_at_most"])),
        ]
        for restart in restarts
    ]
    costly = sorted(restarts, key=lambda r: -r["seconds_without_steps"])[:_ROWS]
    shown = {restart["number"] for restart in costly}
    left = f"The {_ROWS} most expensive of {len(rows)}." if len(rows) > _ROWS else ""
    head = ["#", "cause", "after step", "ranks", "without steps", "steps redone"]
    return ReportTable("Restarts", head, [row for row in rows if int(row[0]) in shown], left, 2)


def cause(restart: Metrics) -> str:
    """Describe why a run started again, and from which state."""
    found = _CAUSES.get(str(restart["cause"]), str(restart["cause"]))
    for what, name in (("lost", "hosts_lost"), ("gained", "hosts_gained")):
        if restart.get(name):
            found += f", {what} {' '.join(restart[name])}"
    return f"{found} (state from {restart['source']})"


def _straggler_table(metrics: Metrics) -> ReportTable:
    named = metrics["stragglers"]
    rows = [
        [
            who(entry).removeprefix("rank "),
            entry["phase"],
            str(entry["times"]),
            f"{entry['first_step']:,}",
            f"{entry['steps']:,}",
            units.number(entry["lowest_score"], 2),
        ]
        for entry in named[:_ROWS]
    ]
    left = f"The {_ROWS} longest of {len(named)}." if len(named) > _ROWS else ""
    head = ["rank", "slow in", "times reported", "first at step", "steps", "lowest score"]
    return ReportTable("Slow ranks", head, rows, left, 2)


def _shards(metrics: Metrics) -> ReportTable:
    """Table of each rank's shard of a model that spans ranks."""
    ranks = metrics["layout"]["ranks"] if metrics["layout"] else []
    places = [rank["place"] for rank in ranks]
    axes = [axis for axis in (places[0] if places else ()) if any(at[axis] for at in places)]
    device = any(rank["peak_device_memory_bytes"] for rank in ranks)
    rows = [
        [
            str(rank["rank"]),
            rank["host"],
            *(str(rank["place"][axis]) for axis in axes),
            units.size(rank["parameter_bytes"]),
            units.size(rank["peak_host_memory_bytes"]),
            *([units.size(rank["peak_device_memory_bytes"])] if device else []),
        ]
        for rank in ranks[:_SHARDS]
    ]
    head = ["rank", "host", *axes, "parameters", "peak host memory"]
    head += ["peak device memory"] if device else []
    left = f"The first {_SHARDS} of {len(ranks)} ranks." if len(ranks) > _SHARDS else ""
    return ReportTable("Shards of the model", head, rows, left, 2)


def _assignment_table(metrics: Metrics) -> ReportTable:
    """Table of assignments; ranks with the same number of micro-batches share a row."""
    rows = []
    for deal in metrics["deals"][-_ROWS:]:
        counts: list[int] = deal["micro_batches"]
        for count in sorted(set(counts)):
            ranks = [str(rank) for rank, own in enumerate(counts) if own == count]
            named = f"rank {' '.join(ranks)}" if len(ranks) <= _NAMED else f"{len(ranks)} ranks"
            rows.append([f"{deal['step']:,}", str(count), named])
    title = "Micro-batches per step, assigned by speed"
    return ReportTable(
        title, ["after step", "micro-batches per rank", "ranks"], rows[-_ROWS:], "", 3
    )


def _lost(metrics: Metrics) -> ReportTable:
    parts, wall = metrics["seconds_by_part"] or {}, metrics["wall_seconds"] or 0.0
    rows = [
        [PARTS[name], units.seconds(seconds), units.percent(seconds / wall if wall else 0.0)]
        for name, seconds in parts.items()
        if seconds > 0
    ]
    return ReportTable("Goodput: use of the wall time", ["", "time", "share"], rows)


def _phases(metrics: Metrics) -> ReportTable:
    shares, each = metrics["phase_shares"] or {}, metrics["phase_seconds_per_step"] or {}
    rows = [[p, units.seconds(each[p]), units.percent(share)] for p, share in shares.items()]
    head = ["phase", "time per step", "share"]
    if (most := metrics["peak_memory_bytes_by_phase"]) is None:
        return ReportTable("Phases, mean of all ranks", head, rows)
    for row in rows:
        row.append(units.size(most.get(row[0])))
    head.append("peak memory")
    on_host = metrics["peak_device_memory_bytes"] is None
    what = "resident" if on_host else "of tensors on the device"
    note = f"Peak memory: {what}, maximum over the ranks, in the steps that ranks compared."
    return ReportTable("Phases, mean of all ranks", head, rows, note)


def _collectives(metrics: Metrics) -> ReportTable:
    rows = [
        [
            entry["operation"],
            f"{entry['calls']:,}",
            units.size(entry["bytes"]),
            units.seconds(entry["seconds"]),
            units.bandwidth(entry["bandwidth_bytes_per_second"]),
        ]
        for entry in metrics["collectives"] or []
    ]
    note = "The time includes waiting for other ranks; bandwidth is bytes / time." if rows else ""
    head = ["operation", "calls", "bytes", "time", "bandwidth"]
    return ReportTable("Collectives of hvdtrain.comm, on rank 0", head, rows, note)


def _facts(run: RecordedRun, metrics: Metrics) -> ReportTable:
    manifest = run.manifest
    generations = run.ledger.generations if run.ledger else ()
    start = generations[-1].start if generations else None
    by_length = start is not None and start.buckets is not None
    size = start.global_size if start else run.config.get("batch", {}).get("global_size")
    horovod = manifest.get("horovod") or {}
    begin = run.ledger.began if run.ledger else None
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(begin)) if begin else None
    hosts = ", ".join(f"{h}: {units.ranks(r)}" for h, r in list(metrics["hosts"].items())[:_ROWS])
    facts = {
        "task": metrics["task"],
        "began": began,
        "ranks by host": hosts + (" …" if len(metrics["hosts"]) > _ROWS else ""),
        "device": manifest.get("device"),
        "controller": horovod.get("controller"),
        "samples per step": None if by_length else size,
        "micro-batches per step": start.per_step if start and by_length else None,
        "padding, mean over steps": units.percent(metrics["mean_padding"]) if by_length else None,
        "seed": manifest.get("seed"),
        "git commit": manifest.get("git_commit"),
        **manifest.get("versions", {}),
    }
    return ReportTable("The run", [], [[k, str(v)] for k, v in facts.items() if v], words=2)
