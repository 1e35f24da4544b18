"""hvdtrain.comm in training runs and in user scripts, and its metrics and report."""

from __future__ import annotations

import json
import multiprocessing
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest

from hvdtrain import cli, comm
from hvdtrain.comm.process import UserCollectives
from hvdtrain.config import Config
from hvdtrain.process.exporting import Exported, build_exporter
from hvdtrain.report.tables import last
from hvdtrain.runtime.memory import PeakMemory
from hvdtrain.runtime.phases import PhaseTimer
from hvdtrain.telemetry.config import TelemetryConfig
from tests.support import own_loops, warm
from tests.support.runs import REPOSITORY, metrics, run, start

DOCS = REPOSITORY / "docs/collectives.md"
LAUNCHERS = {"": 1, "gloo:2": 2, "mpirun:2": 2}
COLLECTING = (
    "--task tests.support.disturbed:Collecting --batch.micro_size 2 --train.duration 4"
    " --eval.every 2 --eval.batches 2 --telemetry.port 0 --telemetry.exchange_every 2"
)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_docs_script_counts_the_same_on_any_number_of_ranks(tmp_path: Path, launcher: str) -> None:
    code, _ = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    script = tmp_path / "count_bytes.py"
    script.write_text(code)
    command = [warm.python(LAUNCHERS[launcher]), str(script)]
    done = start(tmp_path / "output", [str(DOCS)], launcher, command=command).wait(60)
    data = DOCS.read_bytes()
    expected = f"{len(data)} bytes, {data.count(b'e')} of them an e; {LAUNCHERS[launcher]} ranks"
    assert done.returncode == 0 and done.stdout.count(expected) == 1, done


def _collect(directory: Path, launcher: str, global_size: int) -> Any:
    flags = [*COLLECTING.split(), "--run.root", str(directory), "--run.id", "case"]
    size = ["--batch.global_size", str(global_size)]
    return run(directory / "output", [*flags, *size], launcher, {"HVDTRAIN_TEST_PACE": "0"}, 60)


def test_collectives_of_a_task_appear_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = _collect(tmp_path, "gloo:2", global_size=8)
    assert done.returncode == 0, done
    assert len(metrics(tmp_path / "case")) == 4
    assert cli.main(["report", str(tmp_path / "case"), "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {entry["operation"]: entry for entry in report["collectives"]}
    # On rank 0: 2 micro-batches in each of 4 steps, 4 in each of 2 evaluations; the metrics are
    # exchanged before a step is evaluated, so the last evaluation comes too late.
    calls = {name: entry["calls"] for name, entry in found.items()}
    assert calls == {"broadcast": 1, "barrier": 1, **dict.fromkeys(IN_LOSS, 12)}
    assert found["all_gather"]["bytes"] == 12 * 2 * 8 * 4
    for name, entry in found.items():
        known = entry["bandwidth_bytes_per_second"]
        assert known == (entry["bytes"] / entry["seconds"] if name != "barrier" else None)
    (table,) = (t for t in last(_run(), report) if "comm" in t.title)
    assert ["barrier", "1", "0 B"] in [row[:3] for row in table.rows]


IN_LOSS = ("all_gather", "reduce_scatter", "all_reduce")


def _run() -> Any:
    """Return a run for a table of facts."""
    return SimpleNamespace(manifest={}, config={}, ledger=None)


def test_collective_in_a_micro_batch_that_other_ranks_lack_is_rejected(tmp_path: Path) -> None:
    done = _collect(tmp_path, "mpirun:2", global_size=6)
    assert done.returncode == 2, done
    assert done.stderr.count("this rank's micro-batch 2, where another rank has 1") == 1, done
    assert "Traceback" not in done.stderr and done.seconds < 40, done


STALLED = """
import time
import torch
from hvdtrain import comm

comm.barrier()
began = time.monotonic()
try:
    comm.all_reduce(torch.ones(1), name="mine") if comm.rank() == 0 else comm.barrier()
except comm.RankLostError:
    print(f"rank {comm.rank()} waited {time.monotonic() - began:.0f} s", flush=True)
    time.sleep(1)  # both lines are forwarded before the launcher detects an end
"""


def test_collective_that_another_rank_never_calls_times_out(tmp_path: Path) -> None:
    script = tmp_path / "stalled.py"
    script.write_text(STALLED)
    seconds = {"CHECK": "1", "SHUTDOWN": "2"}
    env = {f"HOROVOD_STALL_{name}_TIME_SECONDS": value for name, value in seconds.items()}
    command = [warm.python(2), str(script)]
    done = start(tmp_path / "output", [], "gloo:2", env, command).wait(60)
    waited = dict(re.findall(r"rank (\d) waited (\d+) s", done.stdout))
    assert waited.keys() == {"0", "1"}, done
    assert all(2 <= int(each) <= 15 for each in waited.values()), done
    assert "comm.all_reduce.mine" in done.stderr and "Missing ranks" in done.stderr, done


def test_script_cannot_use_comm_under_an_elastic_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    # Another test of this process may have started Horovod.
    monkeypatch.setattr("hvdtrain.comm.process.is_initialized", lambda: False)
    with pytest.raises(comm.CollectiveError, match=r"comm\.size: .* cannot be elastic"):
        comm.size()


def _in_a_child(results: Any) -> None:
    try:
        results.put(f"rank {comm.rank()}")
    except comm.CollectiveError as error:
        results.put(str(error))


def test_comm_call_in_a_helper_process_is_rejected() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=_in_a_child, args=(results,))
    child.start()
    try:
        assert "comm.rank: called in a helper process" in results.get(timeout=100)
    finally:
        child.kill()
        child.join()


def test_exporter_includes_collective_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    process = UserCollectives()
    monkeypatch.setattr(comm, "COLLECTIVES", process)
    with process.timed("all_gather") as sizes:
        sizes.append(24)
    config = Config()
    config.telemetry = TelemetryConfig(port=1, host="127.0.0.1")
    exchange: Any = SimpleNamespace(parameters=[], state_parts=lambda: [], bytes=1)
    exchange.inflight_seconds = 1.0
    cpu, timer = torch.device("cpu"), PhaseTimer(0.0)
    exported = Exported(exchange, timer, PeakMemory(cpu, timer))
    exporter = build_exporter(config, 0, cpu, exported)
    assert exporter is not None
    try:
        lines = generate_latest(exporter.registry).decode().splitlines()
    finally:
        exporter.close()
    assert 'hvdtrain_collective_total{operation="all_gather"} 1.0' in lines
    assert 'hvdtrain_collective_bytes_total{operation="all_gather"} 24.0' in lines
    assert 'hvdtrain_collective_bytes_total{operation="broadcast"} 0.0' in lines
    assert any(line.startswith("hvdtrain_collective_seconds_total{") for line in lines)


@pytest.mark.parametrize("how", ["sum", "rows"])
def test_result_that_follows_the_ranks_is_said_in_exact_runs(tmp_path: Path, how: str) -> None:
    for run_id, launcher in {"one": "", "three": "gloo:3"}.items():
        flags = [run_id, "gathered.py", launcher, *own_loops.EXACT, how]
        done = own_loops.start(tmp_path, *flags)
        assert done.returncode == 0, done
        called = "all_reduce" if how == "sum" else "all_gather"
        assert done.stderr.count(f"does not cover comm.{called}") == 1, done
    same = own_loops.curve(tmp_path / "one") == own_loops.curve(tmp_path / "three")
    assert same is (how == "rows")
