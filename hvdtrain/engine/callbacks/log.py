"""Callbacks that report each step.

LogMetrics writes metrics.jsonl, the sinks, and rank 0's progress bar or lines. RecordMfu adds the
model FLOPs utilization to the record. Export updates this rank's Prometheus exporter, and
CountBorrowed counts what lent nodes have done.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile

from tqdm import tqdm

from hvdtrain.engine.flops import ModelFlops
from hvdtrain.engine.loop import Callback, Loop, StepRecord
from hvdtrain.log import logger
from hvdtrain.run_files.metrics_file import MetricsFile
from hvdtrain.runtime.terminal import terminal
from hvdtrain.telemetry.borrowed import BorrowedNodes
from hvdtrain.telemetry.exporter import Exporter
from hvdtrain.telemetry.sinks import BackgroundSink
from hvdtrain.text import duration, short

# Without a terminal, lines are at least this far apart, so that a log stays readable.
_SECONDS_BETWEEN_LINES = 2.0
# The remaining time is estimated from the last records of a generation: evaluations and checkpoints
# count.
_RECORDS_FOR_ETA = 100

# A step with one of these is logged despite train.log_every.
_SHOWN = ("validation_loss", "healed", "spike")


class CountBorrowed(Callback):
    """Count the node-seconds of steps on lent hosts; on rank 0."""

    def __init__(self, borrowed: BorrowedNodes) -> None:
        self._borrowed = borrowed

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        self._borrowed.add_step(record["step_seconds"], record["time"])


class LogMetrics(Callback):
    """Write the record of every `train.log_every`-th step; only rank 0 writes and displays.

    On a terminal a progress bar shows each record. Without one, a line is logged at most every 2
    seconds, and for the first step, the last step, each evaluated step, each step in which ranks
    were healed, and each step that was skipped because of a loss spike.

    Every rank keeps the last records: the next rank 0 writes those that the previous rank 0 could
    not write because of a full disk until it died or was set aside.

    Args:
        metrics: None on the other ranks, and on rank 0 while it has no run directory.
        recent: the last records of this process, kept from one generation to the next.
        generation: returns a generation's number for its claim; None: it has no start event.
        sinks: receive the same records as `metrics`.
        units: name and number of units per sample, such as ("tokens", 128).
    """

    def __init__(
        self,
        metrics: MetricsFile | None,
        recent: deque[StepRecord],
        generation: Callable[[str], int | None],
        sinks: Sequence[BackgroundSink],
        units: tuple[str, int] | None,
    ) -> None:
        self._metrics = metrics
        self._recent = recent
        self._generation = generation
        self._sinks = sinks
        self._units = units
        self._bar: tqdm | None = None
        self._next_line = 0.0  # time.monotonic()
        self._seconds: list[float] = []  # of the steps since the last record
        self._samples = 0  # of these steps
        self.last: StepRecord = {}

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        self._seconds.append(record["step_seconds"])
        self._samples += loop.step_samples
        shown = loop.ending or not record.keys().isdisjoint(_SHOWN)
        if loop.progress.step % loop.train.log_every and not shown:
            return
        seconds = sum(self._seconds) / len(self._seconds)
        record["step_seconds"] = seconds
        record["samples_per_second"] = self._samples / len(self._seconds) / seconds
        self._seconds.clear()
        self._samples = 0
        if self._units is not None:
            name, count = self._units
            record[f"{name}_per_second"] = record["samples_per_second"] * count
        self.last = {**self.last, **record}
        while self._recent and self._recent[-1]["step"] >= record["step"]:
            self._recent.pop()  # the run went back to an earlier step
        self._recent.append(record)
        if self._metrics is not None:
            last = self._metrics.last_step or 0
            if record["step"] <= last:
                return
            missing = [*takewhile(lambda recent: recent["step"] > last, reversed(self._recent))]
            for recent in reversed(missing):
                self._write(self._metrics, recent)
        elif loop.topology.rank > 0:
            return
        if terminal() is not None:
            self._show_bar(loop, record)
        elif shown or time.monotonic() >= self._next_line:
            self._show_line(loop, record)

    def _write(self, metrics: MetricsFile, record: StepRecord) -> None:
        line = {**record, "generation": self._generation(record["claim"])}
        del line["claim"]
        metrics.write({key: _strict(value) for key, value in line.items()})
        for sink in self._sinks:
            sink.write(record)

    def _show_line(self, loop: Loop, record: StepRecord) -> None:
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
        steps = loop.train.steps
        logger.info("step %d/%d  %s", record["step"], steps, self._describe(loop, record))

    def _show_bar(self, loop: Loop, record: StepRecord) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=loop.train.steps,
                initial=record["step"] - 1,
                bar_format="step {n_fmt}/{total_fmt} |{bar}| {desc}",
                file=terminal(),
                dynamic_ncols=True,
            )
        # Includes the newest validation loss, which most steps do not have.
        self._bar.set_description_str(self._describe(loop, self.last), refresh=False)
        self._bar.update(record["step"] - self._bar.n)

    def _describe(self, loop: Loop, record: StepRecord) -> str:
        parts = [f"loss {_loss(record['loss'])}"]
        if record["epoch"] * loop.train.steps > record["step"]:  # the run has several epochs
            parts.insert(0, f"epoch {record['epoch']:.2f}")
        if "validation_loss" in record:
            parts.append(f"validation {_loss(record['validation_loss'])}")
        if "ema_validation_loss" in record:
            parts.append(f"ema {_loss(record['ema_validation_loss'])}")
        name = self._units[0] if self._units is not None else "samples"
        if "padding" in record:
            name = "tokens"
            parts.append(f"{record['padding']:.1%} padding")
        parts.append(f"{short(record[f'{name}_per_second'])} {name}/s")
        parts.append(f"ETA {duration(self._remaining_seconds(loop, record))}")
        return "  ".join(parts)

    def _remaining_seconds(self, loop: Loop, record: StepRecord) -> float:
        last = list(self._recent)[-_RECORDS_FOR_ETA:]
        # Another generation's may be of a host with another clock.
        last = [recent for recent in last if recent["claim"] == record["claim"]]
        steps = last[-1]["step"] - last[0]["step"]
        # The first step of a process is slower, and is not in the difference of the times.
        elapsed = last[-1]["time"] - last[0]["time"]
        each = elapsed / steps if steps else record["step_seconds"]
        return float(each * (loop.train.steps - record["step"]))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class RecordMfu(Callback):
    """Add "mfu" to the record: of this step, over all ranks, as if all had this rank's device."""

    def __init__(self, flops: ModelFlops) -> None:
        self._flops = flops

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        ranks = loop.topology.world_size
        seconds = record["step_seconds"]
        record["mfu"] = self._flops.utilization(loop.batch.global_size, seconds, ranks)


class Export(Callback):
    """Update this rank's Prometheus exporter with each step's metrics.

    Every rank has one Export in each generation; the exporter outlives it.

    Args:
        failed_at: unix time of the failure that this generation follows.
        step: steps done when the generation begins; later ones are repeated.
    """

    def __init__(self, exporter: Exporter, failed_at: float | None, step: int) -> None:
        self._exporter = exporter
        exporter.go_back(step)
        self._failed_at = failed_at

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        if loop.ranks_in_sync:
            self._exporter.states_agree(record["step"])
        nonfinite = "skipped" in record and record.keys().isdisjoint(("overflow", "spike"))
        new = self._exporter.step(record, loop.step_samples, nonfinite)
        if new and self._failed_at is not None:
            self._exporter.recovered(time.time() - self._failed_at)
            self._failed_at = None
        self._exporter.assigned(len(loop.assignment))
        if loop.topology.rank == 0:
            self._exporter.replicas_healed(len(record.get("healed", ())))


def _loss(value: float) -> str:
    return f"{value:#.4g}".rstrip(".")


def _strict(value: object) -> object:
    """Replace non-finite numbers by None: JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
