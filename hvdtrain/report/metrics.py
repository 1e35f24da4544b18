"""Metrics of a run for the summary; names contain units, None means unknown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from hvdtrain.audit.goodput import Goodput, measure
from hvdtrain.audit.ledger import GenerationRecord
from hvdtrain.audit.lineage import redone_steps
from hvdtrain.data.order import MixedOrder
from hvdtrain.engine.config import steps_of
from hvdtrain.report import units
from hvdtrain.report.run import Column, RankSeries, RecordedRun, sources_of
from hvdtrain.run_files.listing import alive
from hvdtrain.runtime.mesh import WAITED
from hvdtrain.telemetry.borrowed import BorrowedNodes

Metrics = dict[str, Any]

RECENT = 50  # logged steps that predict the remaining time
STATES = {0: "finished", 75: "preempted"}
# Metrics that every run has: label and format.
COMPARED: dict[str, tuple[str, Callable[[Any], str]]] = {
    "steps": ("steps", units.number),
    "ranks": ("ranks", units.number),
    "final_loss": ("final loss", units.number),
    "final_validation_loss": ("final validation loss", units.number),
    "lowest_validation_loss": ("lowest validation loss", units.number),
    "median_samples_per_second": ("samples per second, median", units.number),
    "median_step_seconds": ("step time, median", units.seconds),
    "exposed_share": ("exposed communication, share of the ranks' time", units.percent),
    "overlap": ("communication hidden behind compute", units.percent),
    "bus_bandwidth_bytes_per_second": ("bus bandwidth, at least", units.bandwidth),
    "slowest_rank_median_score": ("lowest median straggler score", units.number),
    "goodput_share": ("goodput", units.percent),
    "wall_seconds": ("wall time", units.seconds),
    "median_checkpoint_seconds": ("time to write a checkpoint, median", units.seconds),
    "peak_host_memory_bytes": ("peak host memory per rank", units.size),
    "peak_device_memory_bytes": ("peak device memory per rank", units.size),
}


def run_metrics(run: RecordedRun) -> Metrics:
    """Return all metrics of a run: the same keys for every run."""
    return {
        "run": str(run.path),
        "task": run.manifest.get("task") or run.config.get("task"),
        **_progress(run),
        "sources": sources(run),
        **_speed(run),
        **_communication(run.ranks),
        "collectives": _collectives(run.ranks),
        **_memory(run),
        "layout": layout(run),
        "stragglers": stragglers(run),
        "deals": assignments(run),
        **_slowest(run),
        **_goodput(run),
        "restarts": restarts(run),
        "borrowed": borrowed(run),
        **_checkpoints(run),
        "missing": run.missing,
    }


def _progress(run: RecordedRun) -> Metrics:
    step, loss = run.steps["step"], run.steps["loss"]
    last = run.ledger.generations[-1] if run.ledger else None
    code = last.end[1] if last and last.end else None
    ended = STATES.get(code, f"ended with exit code {code}") if code is not None else "no end"
    early = any(g.early_stop for g in run.ledger.generations) if run.ledger else False
    if last and code == 0 and early and last.reached < last.start.total_steps:
        ended = "stopped early"
    total = last.start.total_steps if last else _train_steps(run)
    remaining = None
    if code is None and alive([run.path / ".owner"]):
        lines = [*zip(step[-RECENT:].tolist(), run.steps["time"][-RECENT:].tolist(), strict=True)]
        remaining = remaining_seconds(lines, total)
    return {
        "state": ended if last else None,
        "exit_code": code,
        "steps": int(step[-1]) if len(step) else 0,
        "total_steps": total,
        "remaining_seconds": remaining,
        "epochs": _epochs(last) if last else None,
        "ranks": last.start.world_size if last else run.manifest.get("world_size"),
        "hosts": last.start.hosts if last else run.manifest.get("hosts", {}),
        "final_loss": _last(loss),
        "final_validation_loss": _last(run.steps["validation_loss"]),
        "lowest_validation_loss": _number(np.min, run.steps["validation_loss"]),
        "final_validation": run.validation,
        "steps_without_finite_loss": int((~np.isfinite(loss)).sum()),
    }


def remaining_seconds(lines: Sequence[tuple[float, float]], total: int | None) -> float | None:
    """Seconds until the last step at the rate of the given lines; None if it is unknown.

    Args:
        lines: step and Unix time of the last RECENT lines, in order.
    """
    if total is None or len(lines) < 2 or not lines[-1][0] > lines[0][0]:
        return None
    first, begin, last, now = map(float, (*lines[0], *lines[-1]))
    left = (now - begin) / (last - first) * (total - last)
    return max(0.0, left) if math.isfinite(left) else None


def _train_steps(run: RecordedRun) -> int | None:
    """Configured number of steps; None: the run's length is configured in epochs."""
    return steps_of(str(run.config.get("train", {}).get("duration"))) or None


def _epochs(last: GenerationRecord) -> float | None:
    """Passes over the training data up to the last line of a run; None if its length is unknown."""
    if not last.start.dataset_size:
        return None
    samples = max([last.start.samples, *(line.samples for line in last.lines)])
    return samples / last.start.dataset_size


def sources(run: RecordedRun) -> list[Metrics] | None:
    """Sources of a mixture: samples and epochs up to the last line, last losses; None: no mixture.

    A task that does not report the losses of its sources has None for them.
    """
    last = run.ledger.generations[-1] if run.ledger else None
    if last is None or not sources_of(run.ledger):
        return None
    order = last.start.samples_in_order
    assert isinstance(order, MixedOrder)
    samples = max([last.start.samples, *(line.samples for line in last.lines)])
    used = zip(order.orders.items(), order.before(samples), strict=True)
    return [
        {
            "name": name,
            "samples": count,
            "share": count / samples if samples else None,
            "epochs": count / source.size,
            "final_loss": _last(run.steps[f"loss_{name}"]),
            "final_validation_loss": run.validation.get(f"loss_{name}"),
        }
        for (name, source), count in used
    ]


def _speed(run: RecordedRun) -> Metrics:
    return {
        "median_samples_per_second": _number(np.median, run.steps["samples_per_second"]),
        "median_step_seconds": _number(np.median, run.steps["step_seconds"]),
        "median_mfu": _number(np.median, run.steps["mfu"]),
        "mean_padding": _number(np.mean, run.steps["padding"]),
    }


def _communication(ranks: RankSeries | None) -> Metrics:
    """Sums over all windows and ranks. A single rank does not communicate."""
    found: Metrics = {
        "phase_seconds_per_step": None,
        "phase_shares": None,
        "exposed_share": None,
        "overlap": None,
        "bus_bandwidth_bytes_per_second": None,
    }
    if ranks is None:
        return found
    seconds: Column = np.nansum(ranks.seconds, axis=(1, 2), dtype=np.float64)
    done = float((ranks.steps * ranks.world_size).sum())
    whole = float(seconds.sum())
    if done:
        found["phase_seconds_per_step"] = dict(zip(ranks.phases, seconds / done, strict=True))
    if whole:
        found["phase_shares"] = dict(zip(ranks.phases, seconds / whole, strict=True))
        found["exposed_share"] = _sum(ranks.of("comm_exposed")) / whole
    several = ranks.world_size > 1
    inflight = _sum(ranks.metrics["inflight_seconds"][several])
    if inflight > 0:
        found["overlap"] = 1 - _sum(ranks.of("comm_exposed")[several]) / inflight
        factor = 2 * (ranks.world_size - 1) / ranks.world_size
        moved = np.nansum(ranks.metrics["bytes"] * factor[:, None], dtype=np.float64)
        # In-flight time exceeds the communication time, so the true bandwidth is higher.
        found["bus_bandwidth_bytes_per_second"] = float(moved) / inflight
    return {key: _plain(value) for key, value in found.items()}


def _collectives(ranks: RankSeries | None) -> list[Metrics] | None:
    """Collectives of hvdtrain.comm on rank 0; bandwidth as nccl-tests' "algbw"."""
    if ranks is None:
        return None
    return [
        {
            "operation": operation,
            **called,
            "bandwidth_bytes_per_second": called["bytes"] / called["seconds"]
            if called["bytes"] and called["seconds"]
            else None,
        }
        for operation, called in ranks.collectives.items()
    ]


def _memory(run: RecordedRun) -> Metrics:
    most = run.ranks.most_memory if run.ranks else {}
    found: Metrics = {"peak_memory_bytes_by_phase": most or None}
    for kind in ("host", "device"):
        values = run.ranks.metrics[f"{kind}_memory_bytes"] if run.ranks else np.zeros((0, 0))
        peak = np.nanmax(values, initial=0) if values.size else 0
        known = peak > 0
        found[f"peak_{kind}_memory_bytes"] = int(peak) if known else None
        found[f"peak_{kind}_memory_rank"] = (
            int(np.nanargmax(values) % values.shape[1]) if known else None
        )
    return found


def stragglers(run: RecordedRun) -> list[Metrics]:
    """Ranks and stages that the run reported as slow, with durations; most steps first.

    A rank's number belongs to its generation: after a restart it may be another process.
    """
    found: dict[tuple[Any, ...], Metrics] = {}
    open_: dict[tuple[Any, ...], tuple[Metrics, int]] = {}
    reached = run.ledger.generations[-1].reached if run.ledger else 0
    end = {"event": "start", "step": reached}
    for event in [*run.events, end]:
        kind, step = event.get("event"), event.get("step", 0)
        whose = event.get("rank"), event.get("stage")
        if kind == "straggler":
            key = *whose, event["host"], event["phase"]
            names = dict(zip(("rank", "stage", "host", "phase"), key, strict=True))
            names["ranks"] = event.get("ranks", [event["rank"]])
            entry = found.setdefault(
                key, {**names, "times": 0, "first_step": step, "steps": 0, "lowest_score": 1.0}
            )
            entry["times"] += 1
            entry["lowest_score"] = min(entry["lowest_score"], event["score"])
            open_[whose] = entry, step
        elif kind in ("start", "straggler_ended"):
            closing = list(open_) if kind == "start" else [whose]
            for ended in closing:
                if ended in open_:
                    entry, since = open_.pop(ended)
                    entry["steps"] += max(0, step - since)
    return sorted(found.values(), key=lambda entry: -entry["steps"])


def who(entry: Metrics) -> str:
    """Rank or stage of an entry of `stragglers`, such as "rank 3 on node2"."""
    ranks: list[int] = entry["ranks"]
    if len(ranks) == 1 and entry["stage"] is None:
        return f"rank {entry['rank']} on {entry['host']}"
    named = f"rank{'s' if len(ranks) > 1 else ''} {' '.join(map(str, ranks))}"
    return named if entry["stage"] is None else f"stage {entry['stage']} ({named})"


def assignments(run: RecordedRun) -> list[Metrics]:
    """Assignments of micro-batches: the step after which each applies, and the count per rank."""
    return [
        {"step": event["step"], "micro_batches": event["micro_batches"]}
        for event in run.events
        if event.get("event") == "deal"
    ]


def _slowest(run: RecordedRun) -> Metrics:
    """The rank with the lowest median score, whether reported as slow or not."""
    if run.ranks is None or run.ranks.world_size.max() < 2:
        return {"slowest_rank": None, "slowest_rank_median_score": None}
    score = run.ranks.metrics["score"]
    medians = np.full(score.shape[1], np.nan)
    known = np.isfinite(score).any(axis=0)
    medians[known] = np.nanmedian(score[:, known], axis=0)
    if not known.any():
        return {"slowest_rank": None, "slowest_rank_median_score": None}
    rank = int(np.nanargmin(medians))
    return {"slowest_rank": rank, "slowest_rank_median_score": float(medians[rank])}


def _goodput(run: RecordedRun) -> Metrics:
    if run.ledger is None:
        times = run.steps["time"]
        wall = float(times[-1] - times[0]) if len(times) else None
        return {"goodput_share": None, "wall_seconds": wall, "seconds_by_part": None}
    goodput: Goodput = measure(run.ledger)
    return {
        "goodput_share": goodput.share,
        "wall_seconds": goodput.wall,
        "seconds_by_part": goodput.parts,
    }


def borrowed(run: RecordedRun) -> Metrics | None:
    """What nodes that a batch system lent have added; None: it lent none."""
    generations = run.ledger.generations if run.ledger else []
    if run.ledger is None or not any(one.start.borrowed for one in generations):
        return None
    nodes = BorrowedNodes()
    for generation in generations:
        nodes.hosts, step = generation.start.borrowed, generation.start.step
        for line in generation.lines:
            # A line has the mean of the steps since the last one.
            nodes.add_step((line.step - step) * line.step_seconds, line.time)
            step = line.step
    redone = [redone_steps(before, now.start).least for before, now in pairwise(generations)]
    hours = (generations[-1].last_time - run.ledger.began) / 3600
    return {
        "used_node_seconds": nodes.seconds()["used"],
        "idle_node_seconds": nodes.seconds()["idle"],
        "lost_steps": sum(redone),
        "changes_per_hour": (len(generations) - 1) / hours if hours > 0 else None,
    }


def restarts(run: RecordedRun) -> list[Metrics] | None:
    """Each start after the first step, with its cost; earlier starts belong to the start-up."""
    if run.ledger is None:
        return None
    generations = run.ledger.generations
    reached = accumulate((generation.reached for generation in generations), max)
    first = generations[0].start.step
    later = [
        pair for pair, most in zip(pairwise(generations), reached, strict=False) if most > first
    ]
    return [
        {
            "number": number,
            "cause": now.start.cause,
            "at_seconds": now.start.time - run.ledger.began,
            "source": now.start.source,
            "step": now.start.step,
            "ranks_before": before.start.world_size,
            "ranks_after": now.start.world_size,
            "hosts_lost": sorted(set(before.start.hosts) - set(now.start.hosts)),
            "hosts_gained": sorted(set(now.start.hosts) - set(before.start.hosts)),
            "seconds_without_steps": _pause(before, now),
            "redone_steps": redone_steps(before, now.start).least,
            "redone_steps_at_most": redone_steps(before, now.start).most,
        }
        for number, (before, now) in enumerate(later, start=1)
    ]


def _pause(before: GenerationRecord, now: GenerationRecord) -> float:
    """Seconds between the last step before a start and the first step after it."""
    stopped = before.start.time
    if before.lines:
        last = before.lines[-1]
        # With train.log_every > 1, more steps were done than the last line shows.
        stopped = last.time + max(0, now.start.step - last.step) * last.step_seconds
    if not now.lines:
        return max(0.0, now.last_time - stopped)
    first = now.lines[0]
    stepping = max(0, first.step - now.start.step) * first.step_seconds
    return max(0.0, first.time - stepping - stopped)


def _checkpoints(run: RecordedRun) -> Metrics:
    generations = run.ledger.generations if run.ledger else []
    seconds = [s for g in generations for s in g.checkpoints.values()]
    known = run.ledger is not None
    return {
        "checkpoints": len(seconds) if known else None,
        "median_checkpoint_seconds": float(np.median(seconds)) if seconds else None,
        "last_checkpoint_step": max((s for g in generations for s in g.checkpoints), default=None),
        "failed_checkpoints": sum(len(g.failed) for g in generations) if known else None,
        "healed_ranks": sum(len(r) for g in generations for r in g.healed.values())
        if known
        else None,
        "skipped_steps": sum(
            li.kept and li.skipped and not li.spike for g in generations for li in g.lines
        )
        if known
        else None,
        "spike_steps": sorted(
            li.step for g in generations for li in g.lines if li.kept and li.spike
        )
        if known
        else None,
        "rollbacks": len(generations[-1].start.rollbacks) if known else None,
    }


def _sum(values: Column) -> float:
    return float(np.nansum(values, dtype=np.float64))


def _last(values: Column) -> float | None:
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else None


def _number(of: Any, values: Column) -> float | None:
    known = values[np.isfinite(values)]
    return float(of(known)) if len(known) else None


def _plain(value: Any) -> Any:
    """Convert numpy numbers to Python numbers, for JSON."""
    if isinstance(value, dict):
        return {key: float(number) for key, number in value.items()}
    return value


def layout(run: RecordedRun) -> Metrics | None:
    """Layout of a run; None if each rank held the whole model.

    Returns:
        picture: lines, in the format of --print_layout.
        wait_seconds_per_step: for each measured axis, mean over the ranks.
        bubble_share: fraction of the pipeline schedules' time that ranks waited; None: no pipeline.
        bubble_formula_share: the same if all stages were equally fast.
        ranks: for each rank its place, host, bytes of parameters and peak memory.
    """
    coordinates = run.manifest.get("coordinates")
    if not coordinates:
        return None
    waits, schedule = {}, 0.0
    if run.ranks is not None:
        steps = float((run.ranks.steps * run.ranks.world_size).sum())
        found = {axis: _sum(run.ranks.metrics[f"{axis}_wait_seconds"]) for axis in WAITED}
        waits = {axis: seconds / steps for axis, seconds in found.items() if seconds and steps}
        schedule = _sum(run.ranks.metrics["schedule_seconds"])
    return {
        "picture": run.manifest.get("layout", []),
        "wait_seconds_per_step": waits,
        "bubble_share": found["pipeline"] / schedule if schedule else None,
        "bubble_formula_share": run.ranks.bubble_formula if run.ranks else None,
        "ranks": [_rank_layout(run, rank, at) for rank, at in enumerate(coordinates)],
    }


def _rank_layout(run: RecordedRun, rank: int, at: dict[str, int]) -> Metrics:
    return {
        "rank": rank,
        "host": run.host(rank),
        "place": at,
        "parameter_bytes": _peak_of_rank(run, "parameter_bytes", rank),
        "peak_host_memory_bytes": _peak_of_rank(run, "host_memory_bytes", rank),
        "peak_device_memory_bytes": _peak_of_rank(run, "device_memory_bytes", rank),
    }


def _peak_of_rank(run: RecordedRun, name: str, rank: int) -> int | None:
    if run.ranks is None or rank >= run.ranks.metrics[name].shape[1]:
        return None
    values = run.ranks.metrics[name][:, rank]
    known = values[np.isfinite(values)]
    return int(known.max()) if len(known) and known.max() > 0 else None


def ratios(a: Metrics, b: Metrics) -> dict[str, float | None]:
    """Ratios of `COMPARED` and of the phases; None if a metric is unknown, or A's is 0."""
    found = {name: _ratio(a[name], b[name]) for name in COMPARED}
    for phase in phases(a, b):
        found[f"{phase}_seconds_per_step"] = _ratio(per_step(a, phase), per_step(b, phase))
    return found


def phases(a: Metrics, b: Metrics) -> list[str]:
    """Names of the phases in either run."""
    names = [*(a["phase_seconds_per_step"] or {}), *(b["phase_seconds_per_step"] or {})]
    return list(dict.fromkeys(names))


def per_step(metrics: Metrics, phase: str) -> float | None:
    """Seconds per step in a phase, mean over all ranks."""
    value: float | None = (metrics["phase_seconds_per_step"] or {}).get(phase)
    return value


def _ratio(a: float | None, b: float | None) -> float | None:
    return b / a if a and b is not None else None
