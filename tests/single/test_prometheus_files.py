"""Prometheus' configuration, alert rules and dashboard queries match the exported metrics."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from prometheus_client import generate_latest

from hvdtrain.checkpoint.config import CheckpointConfig
from hvdtrain.config import Config
from hvdtrain.engine.callbacks import copies
from hvdtrain.process.exporting import Exported, build_exporter
from hvdtrain.process.recorder import RunRecorder
from hvdtrain.run_files.owner_token import Claim
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.runtime.memory import PeakMemory
from hvdtrain.runtime.phases import PhaseTimer
from hvdtrain.telemetry.config import TelemetryConfig
from hvdtrain.telemetry.exporter import Exporter, ExporterAddress, write_targets
from tests.support.dashboard import PROMETHEUS, queries, rules

UNIT_TESTS = PROMETHEUS / "tests/alerts.yml"


def _promtool(*arguments: str, text: bytes = b"") -> str:
    tool = shutil.which("promtool")
    if tool is None and os.environ.get("CI") == "true":
        pytest.fail("promtool is not installed (Debian's package prometheus)")
    if tool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    done = subprocess.run([tool, *arguments], input=text, capture_output=True, timeout=60)
    output = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, output
    return output


@pytest.fixture
def metrics(tmp_path: Path) -> Iterator[bytes]:
    """Metrics that rank 0 exports, in Prometheus' text format."""
    config = Config()
    config.telemetry = TelemetryConfig(port=1, host="127.0.0.1")
    exchange: Any = SimpleNamespace(
        inflight_seconds=1.0, bytes=1, parameters=[], state_parts=lambda: []
    )
    cpu, timer = torch.device("cpu"), PhaseTimer(0.0)
    exported = Exported(exchange, timer, PeakMemory(cpu, timer))
    exporter = build_exporter(config, 0, cpu, exported)
    assert exporter is not None
    exporter.describe({"run": "mine"})
    held: Any = SimpleNamespace(
        complete_step=0, store=SimpleNamespace(nbytes=lambda: 0), seconds=0.0, stall_seconds=0.0
    )
    copies.export(exporter, held)
    directory = RunDirectory(tmp_path)
    directory.prepare(fresh=True, claim=Claim.of_this_process())
    recorder = RunRecorder(directory, CheckpointConfig(keep=1))
    recorder.starts.append({"time": 0.0})
    recorder.open(0, exporter)
    yield generate_latest(exporter.registry)
    recorder.close()
    exporter.close()


def _names(metrics: bytes) -> set[str]:
    return set(re.findall(r"^(\w+)", metrics.decode(), re.MULTILINE)) - {"#"}


def test_prometheus_accepts_configuration_and_rules() -> None:
    output = _promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    assert "2 rule files found" in output


def test_alerts_fire_exactly_when_expected() -> None:
    assert "SUCCESS" in _promtool("test", "rules", str(UNIT_TESTS))


def test_metric_names_pass_promtool_check(metrics: bytes) -> None:
    assert _promtool("check", "metrics", text=metrics) == ""


def test_dashboard_queries_are_valid_promql(tmp_path: Path) -> None:
    content = [
        {"record": f"panel:query{i}:value", "expr": expr}
        for i, (_, _, expr) in enumerate(queries("mine"))
    ]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": content}]}))
    assert f"{len(content)} rules found" in _promtool("check", "rules", str(file))


def test_restart_and_checkpoint_are_marked_once_if_rank_0_moves(tmp_path: Path) -> None:
    # One sample per minute. Rank 0 dies after 5 minutes; another host has it from minute 8.
    moved = {
        "restarts_total": ("0x4 stale", "_x8 1x6"),
        "last_checkpoint_step": ("0 0 10 10 10 stale", "_x8 10 10 10 20 20 20 20"),
        "last_checkpoint_timestamp_seconds": ("0 0 110 110 110 stale", "_x8 480x2 650x3"),
    }
    series = [
        {"series": f'hvdtrain_{name}{{run="mine", instance="{instance}"}}', "values": values}
        for name, both in moved.items()
        for instance, values in zip("ab", both, strict=True)
    ]
    marks = {query.title: query.expr for query in queries("mine", step="1m")}
    expected = {"annotation Restart": {8: 1}, "annotation Checkpoint": {2: 110e3, 11: 650e3}}
    cases = [
        {
            "expr": marks[title],
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": "{}", "value": values[minute]}] if minute in values else [],
        }
        for title, values in expected.items()
        for minute in range(15)
    ]
    file = tmp_path / "marks.yml"
    test = {"interval": "1m", "input_series": series, "promql_expr_test": cases}
    file.write_text(yaml.safe_dump({"tests": [test]}))
    assert "SUCCESS" in _promtool("test", "rules", str(file))


def test_rules_and_panels_use_only_exported_metrics(metrics: bytes) -> None:
    every = [rule["expr"] for name in ("recording", "alerts") for rule in rules(name)]
    every += [query.expr for query in queries("mine")]
    recorded = {rule["record"] for rule in rules("recording")}
    named = {name for expr in every for name in re.findall(r"[\w:]*hvdtrain_[\w:]*", expr)}
    assert len(named) > 25
    assert {name for name in named if ":" in name} <= recorded
    assert {name for name in named if ":" not in name} <= _names(metrics)
    unused = recorded - named
    assert not unused, "recorded, but not used"


@pytest.mark.parametrize("rule", rules("alerts"), ids=lambda rule: rule["alert"])
def test_alert_has_labels_annotations_and_unit_test(rule: dict) -> None:
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert rule["for"]
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert notes["runbook_url"] == f"docker/prometheus/runbook.md#{rule['alert'].lower()}"
    assert "$labels.run" in notes["description"]
    cases = yaml.safe_load(UNIT_TESTS.read_text())["tests"]
    (case,) = (case for case in cases if case["name"] == rule["alert"])
    expected = [bool(test["exp_alerts"]) for test in case["alert_rule_test"]]
    assert expected[:2] == [False, True], "just inside `for`, then firing"


def test_recording_rules_follow_naming_scheme() -> None:
    for rule in rules("recording"):
        assert re.fullmatch(r"(run|host|rank):hvdtrain_\w+:\w+", rule["record"])


def test_prometheus_discovers_only_active_runs(tmp_path: Path) -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "hvdtrain", "rules ask for up of this job"
    (pattern,) = job["file_sd_configs"][0]["files"]
    where = pattern.replace("/runs/", "")
    for name in ("one", "two"):
        directory = RunDirectory(tmp_path / name)
        directory.path.mkdir()
        write_targets(directory.targets, name, [ExporterAddress("node1", 0, 9855)], tls=False)
        directory.list_targets()
        assert directory.listed_targets.read_bytes() == directory.targets.read_bytes()
    assert {path.stem for path in tmp_path.glob(where)} == {"one", "two"}
    RunDirectory(tmp_path / "one").remove_targets()
    assert [path.stem for path in tmp_path.glob(where)] == ["two"]
    assert not (tmp_path / "one/targets.json").exists()


def test_unusable_targets_directory_does_not_end_run(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "one")
    directory.path.mkdir()
    write_targets(directory.targets, "one", [ExporterAddress("node1", 0, 9855)], tls=False)
    (tmp_path / ".targets").write_text("no directory: root may write into any")
    directory.list_targets()
    directory.remove_targets()
    assert not directory.targets.exists()


def test_starting_run_does_not_count_as_stalled(tmp_path: Path) -> None:
    exporter = Exporter(TelemetryConfig(port=1, host="127.0.0.1"), 0)
    value = exporter.registry.get_sample_value("hvdtrain_last_step_timestamp_seconds")
    exporter.close()
    assert value is not None and value > 1e9
