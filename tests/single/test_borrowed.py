"""Node-seconds of hosts that a batch system lends to a run: counted, in `top` and in the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.report.metrics import borrowed
from hvdtrain.report.run import read
from hvdtrain.telemetry.borrowed import BorrowedNodes
from hvdtrain.top.scrape import Rank, Target
from hvdtrain.top.screen import header


def test_lent_nodes_are_used_in_steps_and_idle_otherwise() -> None:
    nodes = BorrowedNodes()
    nodes.add_step(10, now=100)
    assert nodes.seconds() == {"used": 0, "idle": 0}
    nodes.hosts = {"a": 100.0, "b": 104.0}
    nodes.add_step(2, now=110)
    nodes.add_step(2, now=112)
    assert nodes.seconds() == {"used": 8, "idle": 12 + 8 - 8}
    nodes.hosts = {"b": 104.0}
    nodes.add_step(5, now=120)
    nodes.hosts = {}
    nodes.add_step(5, now=130)
    assert nodes.seconds() == {"used": 13, "idle": 12 + 16 - 13}


def test_top_shows_lent_nodes() -> None:
    target = Target("a:1", "http", "mine", "0", "a")
    values = {
        "borrowed_nodes": 2.0, "borrowed_used_seconds": 90.0, "borrowed_idle_seconds": 10.0,
        "restarts_total": 4.0, "lost_steps_total": 0.0, "run_start_timestamp_seconds": 1000.0,
        "last_step_timestamp_seconds": 8200.0,
    }  # fmt: skip
    assert header([Rank(target, values=values)])[2:] == [
        "borrowed nodes 2   node-seconds used 90, idle 10   steps lost 0   changes per hour 2.0"
    ]
    assert len(header([Rank(target, values={"restarts_total": 4.0})])) == 2


def test_report_counts_lent_nodes_from_the_files_of_the_run(tmp_path: Path) -> None:
    start = {
        "event": "start", "generation": 0, "cause": "launch", "step": 0, "samples": 0,
        "world_size": 1, "hosts": {"a": [0]}, "source": "new", "seconds": 1.0, "global_size": 8,
        "seed": 1, "dataset_size": 100, "fingerprint": None, "total_steps": 9, "log_every": 1,
    }  # fmt: skip
    grown = {
        "generation": 1, "cause": "hosts", "step": 2, "samples": 16, "world_size": 2,
        "hosts": {"a": [0], "b": [1]}, "source": "memory", "borrowed": {"b": 1004.0},
    }  # fmt: skip
    starts = [{**start, "time": 1000.0}, {**start, **grown, "time": 1010.0}]
    lines = [
        {
            "step": step,
            "samples": 8 * step,
            "loss": 1.0,
            "world_size": 1 if step < 3 else 2,
            "step_seconds": 2.0,
            "samples_per_second": 4.0,
            "generation": int(step > 2),
            "time": 1004.0 + 3 * step,
        }
        for step in range(1, 5)
    ]
    (tmp_path / "manifest.json").write_text('{"starts": []}')
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in starts))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = borrowed(read(tmp_path))
    assert found is not None
    assert (found["used_node_seconds"], found["idle_node_seconds"]) == (4.0, 8.0)
    assert found["lost_steps"] == 0
    assert found["changes_per_hour"] == pytest.approx(3600 / 17)
