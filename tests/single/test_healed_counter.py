"""The counters of healed replicas and of replays."""

from __future__ import annotations

import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.engine.callbacks.log import Export
from hvdtrain.telemetry.config import TelemetryConfig
from hvdtrain.telemetry.exporter import Exporter

FIGURES = "world_size step_seconds samples_per_second loss grad_norm lr time epoch"
RECORD = dict.fromkeys(FIGURES.split(), 1.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_counts_healed_replicas(rank: int) -> None:
    exporter = Exporter(TelemetryConfig(host="127.0.0.1"), 0)
    topology = SimpleNamespace(rank=rank)
    loop: Any = SimpleNamespace(topology=topology, step_samples=8, assignment=[0, 2, 4])
    export = Export(exporter, None, 0)
    for step, healed in enumerate(({}, {"healed": [2, 3]}, {"healed": [1]}), start=1):
        loop.ranks_in_sync = step < 3
        export.on_step(loop, {**RECORD, "step": step, **healed})
    text = _closed(exporter)
    assert "hvdtrain_last_sync_step 2.0" in text.splitlines()
    assert "hvdtrain_micro_batches 3.0" in text.splitlines()
    assert f"hvdtrain_replicas_healed_total {3.0 if rank == 0 else 0.0}" in text.splitlines()


def test_replays_are_counted_with_those_that_differ() -> None:
    exporter = Exporter(TelemetryConfig(host="127.0.0.1"), 0)
    exporter.replayed(agreed=4, differed=0)
    exporter.replayed(agreed=2, differed=2)
    lines = _closed(exporter).splitlines()
    assert {"hvdtrain_replays_total 8.0", "hvdtrain_replays_differed_total 2.0"} <= {*lines}


def _closed(exporter: Exporter) -> str:
    """Return the metrics of an exporter, which ends."""
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=5) as page:
        text: str = page.read().decode()
    exporter.close()
    return text
