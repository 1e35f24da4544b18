"""`make dev-bench`: each benchmark runs and prints its metrics; their values are not checked."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.support.runs import REPOSITORY

TINY = ["--", "--model.layers=1", "--model.width=16", "--model.context=16", "--batch.global_size=8"]


def _metrics(action: str, options: str, *flags: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a benchmark; return its report, and its metrics by name."""
    argv = [sys.executable, "-m", "tests.soak.bench", action, *options.split(), "--format", "json"]
    done = subprocess.run(
        [*argv, *flags], cwd=REPOSITORY, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["benchmark"] == action
    return report, {metric["name"]: metric for metric in report["figures"]}


def test_layout_speed_bench_matches_torch_losses_for_every_axis() -> None:
    report, metrics = _metrics("layout-speed", "--steps 1 --rounds 2", *TINY, "--model.layers=2")
    assert all(float(apart) < 1e-5 for apart in report["losses_apart"].values())
    for axis in ("shard", "pipeline", "tensor"):
        assert metrics[f"{axis} 2: hvdtrain / torch"]["aim"] == "<= 1.05"


def test_telemetry_bench_reports_ratio_and_step_time() -> None:
    _, metrics = _metrics("telemetry", "--steps 2 --rounds 3", *TINY)
    assert metrics["with / without"]["aim"] == "<= 1.01"
    assert 0 < metrics["with telemetry"]["median"] < 10_000


def test_scrape_bench_reports_step_time_and_scrape_time() -> None:
    _, metrics = _metrics("scrape", "--steps 50 --rounds 2", *TINY)
    assert 0 < metrics["scraped every second"]["median"] < 10_000
    assert 0.05 < metrics["one scrape"]["median"] < 20, "ms"


def test_replays_bench_reports_the_cost_of_the_default() -> None:
    report, metrics = _metrics("replays", "--steps 10 --rounds 2", *TINY)
    assert metrics["one replay in 200 steps"]["aim"] == "<= 1.0"
    assert int(report["steps_of_bitwise_identical_losses"]) > 20


def test_start_bench_times_two_launchers_and_torchrun() -> None:
    _, metrics = _metrics("start", "--rounds 1", *TINY)
    for launcher in ("mpirun", "horovodrun"):
        assert metrics[f"{launcher} / torchrun"]["aim"] == "<= 0.7"
        assert 0.5 < metrics[launcher]["median"] < 60


def test_agents_bench_forms_generations_under_two_drivers() -> None:
    _, metrics = _metrics("agents", "--np 16 --rounds 1")
    assert 0 < metrics["the next generation with it"]["median"] < 60


def test_formats_bench_compares_with_the_own_readers() -> None:
    _, metrics = _metrics("formats", "--steps 2 --rounds 1")
    for name in ("Megatron", "Arrow", "Zarr", "HDF5"):
        assert metrics[f"{name}: hvdtrain / own"]["aim"] == ">= 1.2"
    assert metrics["tokenizing .jsonl.zst: hvdtrain / datasets.map"]["median"] > 0


def test_streams_bench_compares_with_torchdata_and_webdataset() -> None:
    _, metrics = _metrics("streams", "--shards 6 --steps 2 --rounds 1")
    assert metrics["hvdtrain, stream / torchdata"]["aim"] == ">= 1"
    assert metrics["hvdtrain, TarShards / webdataset"]["median"] > 0
    assert metrics["start at step 100,000 - start at step 0"]["median"] < 2.0
