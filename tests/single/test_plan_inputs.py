"""`hvdtrain plan`: edge cases of its inputs, including its own JSON output."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.bench.processes import launch, measure
from hvdtrain.cli import main
from hvdtrain.plan.cluster import parse_bandwidth
from hvdtrain.plan.described import forward
from hvdtrain.plan.job import JobProfile, StrategyCost, even_buckets
from hvdtrain.plan.layouts import ModelLayout, memory
from hvdtrain.plan.measure import COLLECTIVES
from hvdtrain.plan.result import RESTART_SECONDS, FailureModel, daly
from tests.support.runs import train

WHOLE = {name: StrategyCost() for name in ("dense", "float16", "bfloat16", "topk")}
JOB = JobProfile(
    0.1,
    0.2,
    0.01,
    0.0,
    8,
    4,
    even_buckets(10_000_000),
    WHOLE,
    4,
    8e7,
    1e8,
    blocks=8,
    block_bytes=1e6,
)
HOSTS = ["--hosts", "4", "--ranks", "2"]
TINY = ["--model.layers=2", "--model.width=64", "--model.context=64"]
ALLREDUCE = {
    "benchmark": "allreduce",
    "ranks": 4,
    "hosts": "node1:2,node2:2",
    "rows": [
        {"side": "Horovod, Gloo", "bytes": size, "seconds": seconds}
        for size, seconds in ((1024, 0.005), (8 << 20, 0.2))
    ],
}

Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def job(tmp_path: Path) -> str:
    """A file that contains JOB."""
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"benchmark": "plan", "job": asdict(JOB)}))
    return str(path)


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """Return the plan of these arguments, which must succeed."""

    def call(*arguments: str) -> dict[str, Any]:
        at = arguments.index("--") if "--" in arguments else len(arguments)
        code = main(["plan", *arguments[:at], "--format", "json", *arguments[at:]])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        found: dict[str, Any] = json.loads(captured.out)
        return found

    return call


def test_weak_scaling_plan_round_trips_through_its_json(
    job: str, plan: Plan, tmp_path: Path
) -> None:
    first = plan("--from", job, *HOSTS, "--weak")
    (tmp_path / "plan.json").write_text(json.dumps(first))
    again = plan("--from", str(tmp_path / "plan.json"), *HOSTS, "--weak")
    assert again["scaling"] == first["scaling"]
    assert again["layouts"] == first["layouts"]
    shared = plan("--from", str(tmp_path / "plan.json"), *HOSTS)
    assert shared["scaling"] == plan("--from", job, *HOSTS)["scaling"]


def test_single_non_dense_strategy_can_be_planned(job: str, plan: Plan) -> None:
    found = plan("--from", job, *HOSTS, "--strategies", "float16")
    assert {row["strategy"] for row in found["scaling"]} == {"float16"}
    whole = [row["layout"] for row in found["layouts"] if "parallel" not in row["flags"]]
    assert [layout["strategy"] for layout in whole] == ["float16"]
    # Layouts on which ranks share the model are listed, whichever exchange was requested.
    assert any(row["layout"]["shard"] > 1 for row in found["layouts"])


def _rewrite(path: Path, **fields: float | None) -> None:
    """Set fields of a run's checkpoint events; None removes them."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        if event["event"] == "checkpoint":
            event.update(fields)
    kept = [{k: v for k, v in event.items() if v is not None} for event in events]
    path.write_text("".join(json.dumps(event) + "\n" for event in kept))


def test_checkpoint_interval_uses_stall_time_of_saves(tmp_path: Path, plan: Plan) -> None:
    flags = ["--train.duration=20", "--telemetry.exchange_every=5", "--eval.every=0"]
    train(tmp_path, "run", [*flags, "--checkpoint.every=10"])
    events = tmp_path / "run" / "events.jsonl"
    saves = [json.loads(line) for line in events.read_text().splitlines()]
    saves = [event for event in saves if event["event"] == "checkpoint"]
    assert saves and all(0 < event["stall_seconds"] < 5 for event in saves)
    given = ["--from", str(tmp_path / "run"), "--mtbf", "1000"]
    mtbf = 3.6e6
    _rewrite(events, seconds=9.0, stall_seconds=2.0)
    found = plan(*given)
    wanted = daly(FailureModel(mtbf, 2.0, RESTART_SECONDS))
    assert found["saving"]["interval_seconds"] == pytest.approx(wanted)
    assert not any("1 GB/s" in sentence for sentence in found["unknown"])
    # A run from before events had it, and a checkpoint whose writer was killed.
    for seconds in (9.0, 0.0):
        _rewrite(events, seconds=seconds, stall_seconds=None)
        found = plan(*given)
        state = 3.0 * sum(4 * bucket["elements"] for bucket in found["job"]["buckets"])
        wanted = daly(FailureModel(mtbf, state / 1e9, RESTART_SECONDS))
        assert found["saving"]["interval_seconds"] == pytest.approx(wanted)
        assert any("1 GB/s" in sentence for sentence in found["unknown"])
    # A free checkpoint is written after each step.
    _rewrite(events, stall_seconds=0.0)
    assert plan(*given)["saving"]["interval_steps"] == 1


def test_memory_includes_unsharded_parameters() -> None:
    """docs/choosing-parallel.md: parameters in no block, with gradient; 2 blocks, 1 gradient."""
    p = float(JOB.parameter_bytes)
    given = replace(JOB, activation_bytes=None, optimizer_bytes=0.0, blocks=10)
    assert memory(given, ModelLayout(shard=4), 8) == pytest.approx(2 * p / 4 + 3 * p / 10)
    half = replace(given, outside_bytes=p / 2)
    assert memory(half, ModelLayout(shard=4), 8) == pytest.approx(2 * p / 4 + p + 3 * p / 20)
    assert memory(half, ModelLayout(tensor=4), 8) == memory(given, ModelLayout(tensor=4), 8)


def test_parameters_outside_blocks_are_counted_separately() -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Linear(3, 4)
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

        def forward(self, values: Tensor) -> Tensor:
            values = self.embedding(values)
            for block in self.blocks:
                values = block(values)
            return values

    class Sum:
        def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
            return {"loss": model(batch).sum()}

    _, kept = forward(Sum(), Tiny(), torch.ones(2, 3))  # type: ignore[arg-type]
    assert kept.blocks == 5
    assert kept.outside_bytes == 4 * (3 * 4 + 4)


def test_saved_plan_keeps_its_assumptions(plan: Plan, tmp_path: Path) -> None:
    first = plan("--gpu", "H100", "--mfu", "0.5", "--", *TINY)
    path = tmp_path / "plan.json"
    for _ in range(2):  # from its JSON, and from the result's JSON
        path.write_text(json.dumps(first))
        first = plan("--from", str(path), "--hosts", "2")
        assert any("0.5 is assumed" in sentence for sentence in first["unknown"])
        assert len(first["unknown"]) == len(set(first["unknown"]))


def test_bandwidth_units_distinguish_bytes_from_bits() -> None:
    texts = ("900GB/s", "50MB/s", "3 GB", "2GBps", "25Gb/s", "25gbit/s", "25GBit/s", "25gbps")
    wanted = [7.2e12, 4e8, 2.4e10, 1.6e10, 25e9, 25e9, 25e9, 25e9]
    assert [parse_bandwidth(text) for text in texts] == wanted


def test_measured_launch_time_excludes_latency_between_hosts(
    job: str, plan: Plan, tmp_path: Path
) -> None:
    path = tmp_path / "allreduce.json"
    path.write_text(json.dumps(ALLREDUCE))
    given = ["--from", job, "--from", str(path), "--hosts", "2", "--ranks", "2", "--latency"]
    # A ring of 4 ranks on 2 hosts: 6 hops, half of them between the hosts.
    assert plan(*given, "1ms")["cluster"]["launch_seconds"] == pytest.approx(0.002)
    assert plan(*given, "0us")["cluster"]["launch_seconds"] == pytest.approx(0.005)
    assert plan(*given, "9ms")["cluster"]["launch_seconds"] == 0.0
    path.write_text(json.dumps(ALLREDUCE | {"hosts": "localhost:4"}))
    assert plan(*given, "1ms")["cluster"]["launch_seconds"] == pytest.approx(0.005)


def test_plan_reports_no_progress_if_failures_outpace_recovery(job: str, plan: Plan) -> None:
    found = plan("--from", job, "--hosts", "1024", "--mtbf", "1e-3", "--price", "1")
    assert found["saving"]["supervised"] == 0.0
    assert found["layouts"][0]["price"] is None


@pytest.mark.parametrize(
    "keys",
    [["--batch.per_rank_size=4", "--batch.micro_size=2"], ["--batch.max_tokens=64"]],
    ids=["per_rank_size", "max_tokens"],
)
def test_plan_rejects_micro_batches_of_variable_size(
    keys: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--gpu", "H100", "--", *TINY, *keys]) == 2
    assert "not batch.max_tokens or batch.per_rank_size" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_that_compute_during_collectives_exit_without_an_abort() -> None:
    _, computing = COLLECTIVES
    assert measure(launch("gloo", 2, computing))["seconds"]["1024"] > 0
