"""The lines of steps: in metrics.jsonl, also if another process becomes rank 0, and in the log."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.engine.callbacks.log import LogMetrics
from hvdtrain.file_thread import wait_for_writes
from hvdtrain.run_files.metrics_file import MetricsFile


def _log(log: LogMetrics, *steps: int, loss: float = 0.0) -> None:
    for step in steps:
        record = {"step": step, "loss": loss, "epoch": step / 200, "claim": "1.0"}
        record |= {"step_seconds": 0.1, "time": 2.0 * step}
        train = SimpleNamespace(log_every=1, steps=100)
        progress = SimpleNamespace(step=step)
        loop: Any = SimpleNamespace(
            progress=progress, step_samples=1, ending=step == 100, train=train
        )
        loop.topology = SimpleNamespace(rank=1)  # for a LogMetrics without metrics
        log.on_step(loop, record)
    wait_for_writes(50)


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


def test_step_line_shows_loss_rate_and_remaining_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = LogMetrics(
        MetricsFile(tmp_path / "metrics.jsonl", 0), deque(), lambda _: 0, (), ("tokens", 1840)
    )
    with caplog.at_level("INFO", "hvdtrain"):
        _log(log, 1, loss=1.53247)
        _log(log, *range(2, 40), 100, loss=153.247)  # the last step is shown in any case
    first, last = caplog.messages
    assert first == "step 1/100  loss 1.532  18.4k tokens/s  ETA 0:10"
    assert last == "step 100/100  loss 153.2  18.4k tokens/s  ETA 0:00"


def test_remaining_time_counts_what_happens_between_steps(tmp_path: Path) -> None:
    log = LogMetrics(MetricsFile(tmp_path / "m", 0), deque(), lambda _: 0, (), None)
    _log(log, *range(1, 41))
    loop: Any = SimpleNamespace(train=SimpleNamespace(steps=100))
    recent = log._recent[0]
    recent["claim"], recent["time"] = "0.0", recent["time"] + 259200  # of a host with another clock
    # Steps of 0.1 s, one every 2 s.
    assert log._remaining_seconds(loop, log.last) == 2.0 * 60
