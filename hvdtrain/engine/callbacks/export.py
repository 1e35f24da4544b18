"""Hands each step's figures to this rank's Prometheus exporter."""

from __future__ import annotations

import time

from hvdtrain.engine.loop import Loop, StepRecord
from hvdtrain.telemetry.exporter import Exporter


class Export:
    """Every rank has one in each generation; the exporter outlives it.

    Args:
        failed_at: when the failure was that this generation comes after, unix time.
        step: steps done when the generation begins; those beyond are done again.
    """

    def __init__(self, exporter: Exporter, failed_at: float | None, step: int) -> None:
        self._exporter = exporter
        exporter.go_back(step)
        self._failed_at = failed_at

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        if loop.synchronised:
            self._exporter.synchronised(record["step"])
        nonfinite = "skipped" in record and "overflow" not in record
        new = self._exporter.step(record, loop.step_samples, nonfinite)
        if new and self._failed_at is not None:
            self._exporter.recovered(time.time() - self._failed_at)
            self._failed_at = None
        self._exporter.dealt(len(loop.deal))
        if loop.topology.rank == 0:
            self._exporter.replicas_healed(len(record.get("healed", ())))

    def close(self) -> None:
        pass
