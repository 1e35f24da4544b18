"""Output of `hvdtrain audit`, as text or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.audit.goodput import PARTS, Goodput, measure
from hvdtrain.audit.ledger import Ledger, StartEvent, read
from hvdtrain.audit.lineage import (
    LIMIT,
    Lineage,
    OrderCheck,
    Redone,
    check_buckets,
    check_order,
    trace,
)
from hvdtrain.data.order import MixedOrder
from hvdtrain.text import aligned, epochs, plural


@dataclass
class Audit:
    """All results of the audit of a run.

    Args:
        orders: check of the order of the samples, named ""; of a mixture, of each source by name.
    """

    ledger: Ledger
    lineage: Lineage
    orders: dict[str, OrderCheck]
    goodput: Goodput

    @property
    def clean(self) -> bool | None:
        """Whether nothing is wrong; None: no step is recorded."""
        if any(not finding.warning for finding in self.lineage.findings):
            return False
        return True if self.lineage.segments else None

    def to_json(self) -> str:
        segments = [asdict(segment) for segment in self.lineage.segments]
        orders = {n: asdict(order) | {"epochs": order.epochs} for n, order in self.orders.items()}
        content = {
            "run": str(self.ledger.path),
            "clean": self.clean,
            "findings": [asdict(finding) for finding in self.lineage.findings],
            "segments": segments,
            "skipped": self.lineage.skipped,
            "spikes": self.lineage.spikes,
            "rollbacks": [
                rollback._asdict() | {"first_sample": samples[0], "last_sample": samples[-1]}
                for rollback, samples in self.lineage.unused
            ],
            "order": orders.pop("", None),
            "sources": orders,
            "generations": [_row(self, number) for number in range(len(self.lineage.redone))],
            "goodput": self.goodput.share,
            "wall_seconds": self.goodput.wall,
            "seconds": self.goodput.parts,
            "clocks": self.ledger.clocks,
        }
        return json.dumps(content, indent=1)

    def to_text(self) -> str:
        return "\n".join(
            [*_summary(self), "", *_generations(self), "", *_samples(self), "", *_time(self)]
        )


def audit(path: Path) -> Audit:
    """Audit RUN/ from the files that the run wrote.

    Raises:
        UserError: there is no run that can be audited.
    """
    ledger = read(path)
    lineage = trace(ledger)
    # Each generation has the same order as the ones before it, as far as they got; see trace.
    first, last = ledger.generations[0].start, ledger.generations[-1].start
    stops = [segment.sample_stop for segment in lineage.segments]
    begin = first.samples_at(first.step)
    end, size = max([begin, *stops]), first.dataset_size
    orders = {}
    if first.own_order:
        orders[""] = OrderCheck(begin, end, size, checked=0, repeated=[])
    elif first.micro_batches is not None:
        starts = [(ledger.generations[one.generation].start, one.last) for one in lineage.segments]
        batches = [start.batches_at(step) for start, step in [(first, first.step), *starts]]
        positions = batches[0] * first.per_step, max(batches) * first.per_step
        orders[""] = check_buckets(*positions, first.micro_batches)
    elif isinstance(last.samples_in_order, MixedOrder):
        mixed = last.samples_in_order
        used = zip(mixed.orders.items(), mixed.before(begin), mixed.before(end), strict=True)
        for (name, order), start, stop in used:
            orders[name] = check_order(order, start, stop, LIMIT // len(mixed.orders))
    else:
        orders[""] = check_order(last.samples_in_order, begin, end)
    for name, check in orders.items():
        if check.repeated:
            what = f"epochs {check.repeated}" + (f" of {name}" if name else "")
            lineage.wrong("samples", f"{what} use a sample more than once")
    return Audit(ledger, lineage, orders, measure(ledger))


def _row(audit: Audit, number: int) -> dict[str, Any]:
    generation = audit.ledger.generations[number]
    start = generation.start
    return {
        "generation": number,
        "cause": start.cause,
        "source": start.source,
        "from_step": start.step,
        "to_step": generation.reached,
        "hosts": start.hosts,
        "world_size": start.world_size,
        "seconds": start.seconds,
        **dict(zip(("redone", "redone_at_most"), audit.lineage.redone[number], strict=True)),
        "lost_step": start.lost_step,
        "damaged_copies": start.damaged_copies or [],
        "sync_every": start.sync_every,
        "checkpoints_failed": generation.failed,
        "healed": generation.healed,
        "replays": generation.replays,
        "end": None
        if generation.end is None
        else dict(zip(("step", "exit_code"), generation.end, strict=True)),
    }


def _summary(audit: Audit) -> list[str]:
    begin = audit.ledger.generations[0].start.step
    last = max([begin, *(segment.last for segment in audit.lineage.segments)])
    wrong = [finding for finding in audit.lineage.findings if not finding.warning]
    name, restarts = audit.ledger.path, len(audit.ledger.generations) - 1
    redone = Redone(*map(sum, zip(*audit.lineage.redone, strict=True)))
    if wrong:
        lines = [f"{name}: NOT clean, {plural(len(wrong), 'finding')}"]
    elif audit.clean is None:
        lines = [f"{name}: no step is recorded; {plural(restarts, 'restart')}"]
    else:
        lines = [
            f"{name}: clean. Steps {begin + 1} to {last} were each applied exactly once; "
            f"{plural(restarts, 'restart')}, {redone.counted()} redone"
        ]
    for finding in audit.lineage.findings:
        kind = f"{'warning, ' if finding.warning else ''}{finding.kind}"
        lines.append(f"  {kind}: {finding.message}")
    for setting in sorted({g.start.depends_on_ranks for g in audit.ledger.generations} - {""}):
        lines.append(f"  the curve depends on the number of ranks: {setting}")
    if audit.lineage.skipped:
        lines.append(
            f"  skipped because the gradient was not finite: steps {audit.lineage.skipped}"
        )
    if audit.lineage.spikes:
        lines.append(f"  skipped because of a loss spike: steps {audit.lineage.spikes}")
    lines += [
        f"  loss spike at step {rollback.spike}: rolled back to step {rollback.to}; samples "
        f"{samples[0]} to {samples[-1]} of the order are passed over"
        for rollback, samples in audit.lineage.unused
    ]
    for number, generation in enumerate(audit.ledger.generations):
        start, redone = generation.start, audit.lineage.redone[number]
        if start.sync_every and start.source == "memory" and any(redone):
            lines.append(
                f"  generation {number}: rolled back to step {start.step}, the last step "
                f"with the same state on all ranks (exchange.sync_every {start.sync_every}); "
                f"steps redone: {redone}"
            )
        if start.source == "memory_copy":
            repeated = f"; steps redone: {redone}" if any(redone) else ", the newest one"
            lines.append(
                f"  generation {number}: shards of the model were lost with the ranks that held "
                f"them; continued from the copies in memory of step {start.step}{repeated}"
            )
        elif start.lost_step is not None:
            lines.append(
                f"  generation {number}: the state of step {start.lost_step} was lost with the "
                f"ranks that held it; continued from step {start.step} ({start.source})"
            )
        for damaged in start.damaged_copies or ():
            lines.append(
                f"  generation {number}: the copy in memory of {damaged} was damaged, and not used"
            )
        for step, ranks in generation.healed.items():
            lines.append(f"  generation {number}: ranks {ranks} were healed after step {step}")
        for step, (verdict, hosts) in generation.replays.items():
            where = f": {', '.join(hosts)}" if hosts else ""
            lines.append(f"  generation {number}: replay in step {step}, {verdict}{where}")
        if generation.failed:
            lines.append(f"  generation {number}: checkpoints of steps {generation.failed} failed")
    return lines


def _generations(audit: Audit) -> list[str]:
    rows = [["generation", "cause", "from", "to", "seconds", "redone", "end", "ranks"]]
    for number in range(len(audit.ledger.generations)):
        row = _row(audit, number)
        hosts = " ".join(f"{h}:{_ranks(ranks)}" for h, ranks in row["hosts"].items())
        rows.append(
            [
                str(number),
                f"{row['cause']}, {row['source']}",
                str(row["from_step"]),
                str(row["to_step"]),
                f"{row['seconds']:.2f}",
                str(audit.lineage.redone[number]),
                "-" if row["end"] is None else str(row["end"]["exit_code"]),
                f"{row['world_size']} ({hosts})",
            ]
        )
    return aligned(rows, left=range(len(rows[0])))


def _ranks(ranks: list[int]) -> str:
    """Format ranks, such as "0-3", or "0,2" if there are gaps."""
    whole = ranks == list(range(ranks[0], ranks[-1] + 1)) if ranks else False
    return f"{ranks[0]}-{ranks[-1]}" if whole and len(ranks) > 1 else ",".join(map(str, ranks))


def _samples(audit: Audit) -> list[str]:
    lines = [
        f"steps {s.first} to {s.last}: samples {s.sample_start} to {s.sample_stop - 1} of the "
        f"order, {plural(s.world_size, 'rank')}, generation {s.generation}"
        for s in audit.lineage.segments
    ]
    lines += [_epochs(audit, *named) for named in audit.orders.items()]
    return [*lines, *_not_seen(audit.ledger.generations[0].start)]


def _not_seen(first: StartEvent) -> list[str]:
    """What no file of the run shows: the content of data without a fingerprint."""
    if first.own_order:
        return ["of the samples' content, only the first 16 of a start were compared between ranks"]
    if first.samples_compared is None:
        return []
    return [
        f"of the samples' content, {first.samples_compared} at each start were compared: the data "
        "has no fingerprint"
    ]


def _epochs(audit: Audit, source: str, order: OrderCheck) -> str:
    if order.size:
        used = epochs(order.epochs, order.size) + (f" of {source}" if source else "")
    else:
        used = f"{order.stop - order.start} samples of data whose length is unknown"
    starts = [generation.start for generation in audit.ledger.generations]
    if starts[0].own_order:
        kept = sum(start.step > 0 and start.data_position is not None for start in starts)
        continued = f"; {plural(kept, 'start')} continued at a saved position" if kept else ""
        return f"{used}, in the dataset's own order, which only it knows{continued}"
    if order.all_checked:
        looked = "at every position"
    else:
        looked = f"at {order.checked} of {order.stop - order.start} positions, evenly spaced,"
    return f"{used}; {looked} the order was computed, and " + (
        "an epoch uses a sample TWICE" if order.repeated else "no epoch uses a sample twice"
    )


def _time(audit: Audit) -> list[str]:
    goodput = audit.goodput
    lines = [f"goodput {goodput.share:.3f}: of {goodput.wall:.1f} s"]
    for name, seconds in goodput.parts.items():
        share = seconds / goodput.wall if goodput.wall > 0 else 0.0
        lines.append(f"  {seconds:10.1f} s  {share:6.1%}  {PARTS[name]}")
    return [*lines, *(f"  {sentence}" for sentence in audit.ledger.clocks)]
