"""What people see during a run: metrics.jsonl, the sinks, and rank 0's bar or lines."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from tqdm import tqdm

from hvdtrain.engine.loop import Loop, StepRecord
from hvdtrain.log import logger
from hvdtrain.run_files.metrics_file import MetricsFile
from hvdtrain.telemetry.sinks import BackgroundSink


class LogMetrics:
    """Writes the record of every `train.log_every`-th step; rank 0 only writes and shows.

    Args:
        metrics: None on the other ranks.
        sinks: get what metrics gets.
        units: name and number of what a sample counts as, such as ("tokens", 128).
    """

    def __init__(
        self,
        metrics: MetricsFile | None,
        sinks: Sequence[BackgroundSink],
        units: tuple[str, int] | None,
    ) -> None:
        self._metrics = metrics
        self._sinks = sinks
        self._units = units
        self._bar: tqdm | None = None
        self._seconds: list[float] = []  # of the steps since the last line
        self.last: StepRecord = {}

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        self._seconds.append(record["step_seconds"])
        told = loop.ending or "validation_loss" in record or "healed" in record
        if loop.progress.step % loop.train.log_every and not told:
            return
        seconds = sum(self._seconds) / len(self._seconds)
        self._seconds.clear()
        record["step_seconds"] = seconds
        record["samples_per_second"] = loop.batch.global_size / seconds
        if self._units is not None:
            name, count = self._units
            record[f"{name}_per_second"] = record["samples_per_second"] * count
        self.last = {**self.last, **record}
        if self._metrics is None or loop.progress.step <= (self._metrics.last_step or 0):
            return
        self._metrics.write({key: _strict(value) for key, value in record.items()})
        for sink in self._sinks:
            sink.write(record)
        self._show(loop, record)

    def _show(self, loop: Loop, record: StepRecord) -> None:
        if not sys.stderr.isatty():
            left = (loop.train.steps - record["step"]) * record["step_seconds"]
            logger.info("%s  left %s", self._line(loop, record), tqdm.format_interval(left))
            return
        if self._bar is None:
            self._bar = tqdm(total=loop.train.steps, initial=record["step"] - 1, unit="step")
        self._bar.set_postfix_str(self._figures(record), refresh=False)
        self._bar.update(record["step"] - self._bar.n)

    def _line(self, loop: Loop, record: StepRecord) -> str:
        return f"step {record['step']}/{loop.train.steps}  {self._figures(record)}"

    def _figures(self, record: StepRecord) -> str:
        parts = [f"loss {record['loss']:.4f}"]
        if "validation_loss" in record:
            parts.append(f"validation {record['validation_loss']:.4f}")
        parts.append(f"{record['samples_per_second']:.1f} samples/s")
        if self._units is not None:
            name = self._units[0]
            parts.append(f"{record[f'{name}_per_second']:.0f} {name}/s")
        return "  ".join(parts)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _strict(value: object) -> object:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
