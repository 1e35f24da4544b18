"""Telemetry of a model that spans ranks: stragglers, wait times and parameter shards."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import cli
from hvdtrain.run_files.events_file import read_lines
from hvdtrain.runtime.mesh import key_of_degree
from tests.support.runs import TINY, metrics, run, train

pytestmark = pytest.mark.slow

STEPS, EVERY = 6, 2
LAG = 0.5  # seconds per micro-batch, longer than on a busy machine
FLAGS = [
    *TINY,
    *("--model.layers", "2", "--batch.micro_size", "4"),
    *("--train.duration", str(STEPS), "--train.log_every", "1", "--checkpoint.every", "0"),
    *("--telemetry.exchange_every", str(EVERY), "--train.replica_check_every", "4"),
]


def _run(root: Path, axes: dict[str, int], ranks: int, slow: int) -> tuple[Path, str]:
    """Run with one slow rank; return (its directory, its output)."""
    flags = [f"--{key_of_degree(axis)}={size}" for axis, size in axes.items()]
    where = ["--run.root", str(root), "--run.id", "run"]
    flags += ["--task", "tests.support.disturbed:SlowToCompute"]
    env = {"HVDTRAIN_TEST_SLOW": f"{slow}:{LAG}"}
    done = run(root / "output", [*FLAGS, *flags, *where], f"gloo:{ranks}", env, timeout=300)
    assert done.returncode == 0, done
    return root / "run", done.stderr


def _named(directory: Path) -> list[tuple[Any, ...]]:
    events = [e for e in read_lines(directory / "events.jsonl") if e["event"] == "straggler"]
    return [(e["rank"], e.get("stage"), e.get("ranks"), e["phase"]) for e in events]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two pipelines of two stages; rank 3, the second stage of the second one, is slow."""
    return _run(tmp_path_factory.mktemp("pipelines"), {"pipeline": 2}, ranks=4, slow=3)


def _columns(directory: Path) -> dict[str, list[float]]:
    """Return the mean of every metric in ranks.jsonl for each rank, without the first line."""
    lines = read_lines(directory / "ranks.jsonl")[1:]
    names = [name for name, value in lines[0].items() if isinstance(value, list)]
    ranks = {name: zip(*(line[name] for line in lines), strict=True) for name in names}
    return {name: [sum(own) / len(lines) for own in each] for name, each in ranks.items()}


def test_slow_rank_in_one_of_two_pipelines_is_identified(
    pipelines: tuple[Path, str],
) -> None:
    directory, said = pipelines
    assert _named(directory) == [(3, None, None, "compute")], said
    assert re.search(r"rank 3 on \S+ is slow: .* it loses most in: compute", said), said


def test_slow_pipeline_stage_is_reported_as_stage(tmp_path: Path) -> None:
    directory, said = _run(tmp_path, {"pipeline": 2}, ranks=2, slow=1)
    assert _named(directory) == [(1, 1, None, "compute")], said
    assert re.search(r"pipeline stage 1 \(rank 1 on \S+\) is slow: ", said), said


@pytest.mark.parametrize("axis", ["context", "shard", "tensor"])
def test_slow_rank_is_reported_instead_of_rank_waiting_for_it(axis: str, tmp_path: Path) -> None:
    directory, said = _run(tmp_path, {axis: 2}, ranks=2, slow=1)
    assert _named(directory) == [(1, None, None, "compute")], said
    waited = _columns(directory)[f"{axis}_wait_seconds"]
    assert waited[0] > waited[1] + 0.8 * EVERY * LAG  # at least one micro-batch per step


def test_pipeline_wait_times_and_parameter_shards_are_recorded(
    pipelines: tuple[Path, str],
) -> None:
    directory, _ = pipelines
    found = _columns(directory)
    wait, whole = found["pipeline_wait_seconds"], found["schedule_seconds"]
    # Rank 2 waits mostly for rank 3; 0 and 1 wait for gradients after their schedules.
    assert wait[2] > 0.5 * whole[2] and wait[3] < 0.5 * whole[3]
    assert read_lines(directory / "ranks.jsonl")[-1]["bubble_formula"] == 1 / 2
    parts = found["parameter_bytes"]
    assert parts[0] == parts[2] and parts[1] == parts[3] and parts[0] != parts[1]
    for line in read_lines(directory / "ranks.jsonl"):
        for rank, seconds in enumerate(zip(*line["phases"].values(), strict=True)):
            assert sum(seconds) == pytest.approx(line["wall_seconds"][rank], rel=0.02, abs=0.01)


def test_report_shows_layout(
    pipelines: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = pipelines
    capsys.readouterr()
    assert cli.main(["report", str(directory), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["layout"]
    assert found["picture"][0] == "4 ranks = data 2 x pipeline 2"
    assert found["bubble_formula_share"] == pytest.approx(1 / 2)
    assert 0 < found["bubble_share"] < 1 and found["wait_seconds_per_step"]["pipeline"] > 0
    places = [(rank["place"]["data"], rank["place"]["pipeline"]) for rank in found["ranks"]]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rank in found["ranks"]:
        assert rank["parameter_bytes"] and rank["peak_host_memory_bytes"]
    assert cli.main(["report", str(directory)]) == 0
    page = (directory / "report.html").read_text()
    for part in ("data 2 x pipeline 2", "pipeline bubble", "replica 1 on ", "Shards of the model"):
        assert part in page, part


def test_state_hash_is_independent_of_layout(tmp_path: Path) -> None:
    """A pipeline is bitwise identical to one rank if nothing is tied or clipped."""
    flags = ["--model.tied_embeddings", "false", "--optim.clip_norm", "0", "--train.duration", "4"]
    flags += ["--model.layers", "2", "--train.replica_check_every", "2"]
    one = train(tmp_path, "one", flags)
    parts = train(tmp_path, "parts", [*flags, "--parallel.pipeline", "2"], "mpirun:2")
    hashes = [
        [line["state_hash"] for line in metrics(directory) if "state_hash" in line]
        for directory in (one, parts)
    ]
    assert len(hashes[0]) == 2 and hashes[0] == hashes[1]
