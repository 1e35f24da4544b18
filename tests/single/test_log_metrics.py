"""Continuity of metrics.jsonl when another process becomes rank 0."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hvdtrain.engine.callbacks.log import LogMetrics
from hvdtrain.run_files.metrics_file import MetricsFile


def _log(log: LogMetrics, *steps: int, loss: float = 0.0) -> None:
    for step in steps:
        record = {"step": step, "loss": loss, "epoch": 1.0, "step_seconds": 0.1, "claim": "1.0"}
        train = SimpleNamespace(log_every=1, steps=100)
        progress = SimpleNamespace(step=step)
        loop: Any = SimpleNamespace(progress=progress, step_samples=1, ending=False, train=train)
        log.on_step(loop, record)


def _rank_0(path: Path, recent: deque[dict[str, Any]], after: int) -> LogMetrics:
    return LogMetrics(MetricsFile(path, after), recent, lambda _: 0, (), None)


def test_new_rank_0_writes_records_lost_with_previous_one(tmp_path: Path) -> None:
    path, recent = tmp_path / "metrics.jsonl", deque[dict[str, Any]](maxlen=10)
    other = LogMetrics(None, recent, lambda _: 0, (), None)
    _log(_rank_0(path, deque(), 0), 1, 2)
    _log(other, 1, 2, 3, 4)  # 3 and 4 are lost with rank 0
    _log(_rank_0(path, recent, 4), 5)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_superseded_records_are_dropped_when_steps_are_repeated(tmp_path: Path) -> None:
    path, recent = tmp_path / "metrics.jsonl", deque[dict[str, Any]](maxlen=10)
    other = LogMetrics(None, recent, lambda _: 0, (), None)
    _log(other, 1, 2, 3, loss=1.0)
    _log(other, 2, loss=2.0)
    _log(_rank_0(path, recent, 2), 3, loss=2.0)
    losses = [json.loads(line)["loss"] for line in path.read_text().splitlines()]
    assert losses == [1.0, 2.0, 2.0]
