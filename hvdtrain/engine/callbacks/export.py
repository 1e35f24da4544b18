"""Hands each step's figures to this rank's Prometheus exporter."""

from __future__ import annotations

from hvdtrain.engine.loop import Loop, Record
from hvdtrain.telemetry.exporter import Exporter


class Export:
    """Every rank has one; the exporter outlives it, as it does the rounds of an elastic run."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    def on_step(self, loop: Loop, record: Record) -> None:
        self._exporter.step(record, loop.batch.global_size, record.get("skipped", False))
        if loop.topology.rank == 0:
            self._exporter.replicas_healed(len(record.get("healed", ())))

    def close(self) -> None:
        pass
