"""Detection of slow ranks from the step times that all ranks exchange.

One small all-gather every `telemetry.exchange_every` steps. It begins after one step and is read
after the next, so no rank waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from hvdtrain import comm
from hvdtrain.data.assignment import by_speed
from hvdtrain.engine.loop import Callback, Loop, StepRecord
from hvdtrain.exchange.base import Exchange
from hvdtrain.log import logger
from hvdtrain.run_files.metrics_file import MetricsFile
from hvdtrain.runtime.collectives import begin_gather, completed
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.mesh import WAITED
from hvdtrain.runtime.phases import PHASES
from hvdtrain.runtime.tensor_shards import local
from hvdtrain.telemetry.config import STRAGGLER_THRESHOLD, TelemetryConfig
from hvdtrain.telemetry.exporter import Exporter
from hvdtrain.telemetry.straggler import (
    COLUMNS,
    DataWatch,
    StragglerChange,
    StragglerWatch,
    Table,
    column,
    scores,
)

_PROCESS = psutil.Process()
# Number of comparisons whose medians determine an assignment; all were made under the current one.
_COMPARISONS = 3
# Minimum relative reduction of the step time for a new assignment: a wrong one costs time.
_GAIN = 0.05


@dataclass(frozen=True)
class Destinations:
    """Outputs of this rank's findings.

    Args:
        exporter: this rank's exporter.
        file: RUN/ranks.jsonl, on rank 0: one line per exchange.
        emit: called with each change ("straggler" or "straggler_ended", fields), on rank 0.
    """

    exporter: Exporter | None
    file: MetricsFile | None
    emit: Callable[..., None]


class DetectStragglers(Callback):
    """Compare all ranks' times; every rank has the same metrics and makes the same decisions.

    Every rank has one in each generation. If micro-batches are assigned by speed, it also reassigns
    them.

    Args:
        step: steps done when the generation begins.
        assign_by_speed: slow ranks receive fewer micro-batches.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        step: int,
        exchange: Exchange,
        destinations: Destinations,
        context: RankContext,
        assign_by_speed: bool = False,
    ) -> None:
        self._every = config.exchange_every
        self._grid = context.mesh.grid
        self._ranks = context.mesh.topology.world_size
        self._watch = StragglerWatch(STRAGGLER_THRESHOLD, self._grid)
        self._data_watch = DataWatch()
        self._speeds = Speeds() if assign_by_speed else None
        self._timer, self._memory = context.timer, context.memory
        self._exchange = exchange
        self._parameter_bytes = sum(local(p).nbytes for p in exchange.parameters)
        self._device = context.device
        self._exporter = destinations.exporter
        self._file = destinations.file
        self._emit = destinations.emit
        self._reported_step = step
        self._micro_batches = 0
        self._before = self._totals()
        self._memory.record(self._memory.of_run)  # the first step creates the optimizer's state
        self._handle: int | None = None
        self._line: dict[str, Any] = {}

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        step, micro_batches = loop.progress.step, len(loop.assignment)
        if self._handle is not None:
            self._evaluate(loop, completed(self._handle).numpy())
        # After a failure the callbacks are called for the last step again: nothing is new then.
        if step == self._reported_step:
            return
        self._watch_memory(step)
        self._micro_batches += micro_batches
        if step % self._every and not loop.ending:
            return
        own = self._row()
        self._line = {"step": step, "steps": step - self._reported_step, "time": record["time"]}
        if self._timer.bubble.steps:
            self._line["bubble_formula"] = self._timer.bubble.formula
        if called := comm.COLLECTIVES.drain():
            self._line["collectives"] = called
        self._reported_step = step
        if self._ranks == 1:
            self._evaluate(loop, own.numpy())
            return
        self._handle = begin_gather(own, "stragglers")
        if loop.generation_ends:  # if this rank left first, the all-gather would fail on others
            self._evaluate(loop, completed(self._handle).numpy())

    def _watch_memory(self, step: int) -> None:
        """Record memory only around the steps that are compared, because recording has a cost."""
        self._memory.stop(self._memory.of_run)
        if (step + 1) % self._every in (0, 1):
            self._memory.record(self._memory.of_run)

    def _totals(self) -> Tensor:
        """Cumulative metrics, in the order of `COLUMNS`."""
        seconds, exchange = self._timer.seconds(), self._exchange
        growing = [*(seconds[phase] for phase in PHASES), time.monotonic()]
        growing += [exchange.inflight_seconds, exchange.bytes, self._micro_batches]
        growing += [*self._timer.waited.values(), self._timer.waited_in_passes]
        growing.append(self._timer.bubble.schedule_seconds)
        return torch.tensor(growing, dtype=torch.float64)

    def _row(self) -> Tensor:
        """This rank's row of the table (1 x `COLUMNS`); the next row starts here."""
        before, self._before = self._before, self._totals()
        allocated = torch.cuda.memory_allocated() if self._device.type == "cuda" else 0
        memory = [_PROCESS.memory_info().rss, allocated, self._parameter_bytes]
        peaks = self._memory.of_run.device or self._memory.of_run.host
        memory += [peaks.get(phase, 0) for phase in PHASES]
        row = torch.cat((self._before - before, torch.tensor(memory, dtype=torch.float64)))
        assert len(row) == len(COLUMNS)
        return row.unsqueeze(0)

    def _evaluate(self, loop: Loop, table: Table) -> None:
        """Evaluate the metrics of all ranks, which every rank now has."""
        self._handle = None
        rank, alone = loop.topology.rank, self._ranks == 1
        found = np.ones(1) if alone else scores(table, self._grid)
        changes = () if alone else self._watch.look(table)
        if self._exporter is not None:
            self._exporter.straggler(float(found[rank]), self._watch.slow.get(rank))
        counts = self._speeds and self._speeds.look(table, loop.assignment.counts)
        if counts:
            loop.assignment.change(counts)
            if rank == 0:
                self._emit("deal", step=loop.progress.step, micro_batches=counts)
                fewest, most = min(counts), max(counts)
                logger.info(
                    "micro-batches reassigned by speed: %d (rank %d) to %d (rank %d)",
                    *(fewest, counts.index(fewest), most, counts.index(most)),
                )
        if self._file is None:
            return
        for change in changes:
            self._tell(loop, change)
        if (ratio := self._data_watch.look(table)) is not None:
            self._emit("data_bound", step=self._line["step"], ratio=round(ratio, 3))
            logger.warning(
                "steps wait for their data: loading takes %.1f times as long as forward and "
                "backward; load ahead with (more) loader.workers, or make samples cheaper",
                ratio,
            )
        if self._line["step"] > (self._file.last_step or 0):
            columns = dict(zip(COLUMNS, table.T.tolist(), strict=True))
            spanned = _spanned_columns(columns) if self._grid.replica_size > 1 else {}
            score = {"score": _round(found.tolist(), 4)}
            self._file.write({**self._line, **_columns(columns), **spanned, **score})

    def _tell(self, loop: Loop, change: StragglerChange) -> None:
        ranks, hosts = change.ranks, loop.topology.hosts
        fields = {"step": self._line["step"], "rank": ranks[0], "host": hosts[ranks[0]]}
        fields |= {"phase": change.kind}
        if change.stage is not None:
            fields["stage"] = change.stage
        if len(ranks) > 1:
            fields["ranks"] = [*ranks]
        who, they = _named(change, hosts)
        if not change.slow:
            self._emit("straggler_ended", **fields)
            logger.info("%s %s no longer slow", who, they)
            return
        self._emit("straggler", **fields, score=round(change.score, 3))
        logger.warning(
            "%s %s slow: %s own part of a step takes %.1f times as long as the fastest %s's "
            "(straggler score %.2f), and %s most in: %s",
            who,
            they,
            "its" if they == "is" else "their",
            1 / change.score,
            "rank" if change.stage is None else "stage",
            change.score,
            "it loses" if they == "is" else "they lose",
            change.kind,
        )

    def close(self) -> None:
        self._memory.stop(self._memory.of_run)
        if self._exporter is not None:
            self._exporter.straggler(1.0, None)


class Speeds:
    """Decision when to reassign micro-batches, from the times that all ranks report.

    All ranks make the same decision because they have the same times.
    """

    def __init__(self) -> None:
        self._seconds: deque[Table] = deque(maxlen=_COMPARISONS)

    def look(self, table: Table, counts: Sequence[int]) -> list[int] | None:
        """Return how many micro-batches each rank processes from now on; None: no change.

        Args:
            table: see straggler.py.
            counts: current number of each rank.
        """
        of_ranks = column(table, "micro_batches")
        steps = of_ranks.sum() / sum(counts)
        if not of_ranks.all():
            return None  # fewer micro-batches than ranks: nothing to reassign
        passes = column(table, "data") + column(table, "forward") + column(table, "backward")
        of_each = passes / of_ranks
        fixed = (column(table, "optimizer") + column(table, "checkpoint")) / steps
        self._seconds.append(np.stack((of_each, fixed)))
        if len(self._seconds) < _COMPARISONS:
            return None
        seconds, beside = np.median(np.stack(self._seconds), axis=0).tolist()

        def lasts(counts: Sequence[int]) -> float:
            return max(b + n * s for b, n, s in zip(beside, counts, seconds, strict=True))

        found = by_speed(sum(counts), seconds, beside)
        if lasts(found) > (1 - _GAIN) * lasts(counts):
            return None
        self._seconds.clear()
        return found


def _columns(columns: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Each metric as a list over the ranks: a tenth of the bytes of one line per rank."""
    whole = ("bytes", "micro_batches", "host_memory_bytes", "device_memory_bytes")
    return {
        "phases": {phase: _round(columns[phase], 6) for phase in PHASES},
        "wall_seconds": _round(columns["wall_seconds"], 6),
        "inflight_seconds": _round(columns["inflight_seconds"], 6),
        **{name: [*map(int, columns[name])] for name in whole},
        "most_memory_bytes": {
            phase: int(max(columns[f"{phase}_memory_peak_bytes"])) for phase in PHASES
        },
    }


def _spanned_columns(columns: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Metrics of a model that spans ranks."""
    times = (*(f"{axis}_wait_seconds" for axis in WAITED), "schedule_seconds")
    return {
        **{name: _round(columns[name], 6) for name in times},
        "parameter_bytes": [*map(int, columns["parameter_bytes"])],
    }


def _named(change: StragglerChange, hosts: Sequence[str]) -> tuple[str, str]:
    """(such as "pipeline stage 1 (ranks 2, 3 on node2)", "is" or "are")."""
    by_host: dict[str, list[str]] = {}
    for rank in change.ranks:
        by_host.setdefault(hosts[rank], []).append(str(rank))
    several = len(change.ranks) > 1
    where = " and ".join(f"{', '.join(ranks)} on {host}" for host, ranks in by_host.items())
    who = f"rank{'s' if several else ''} {where}"
    if change.stage is not None:
        return f"pipeline stage {change.stage} ({who})", "is"
    return (f"{who}, which compute in step,", "are") if several else (who, "is")


def _round(values: Sequence[float], digits: int) -> list[float]:
    return [round(value, digits) for value in values]
