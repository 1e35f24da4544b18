"""A model that spans ranks of two hosts whose ranks and hosts are killed: no step is lost."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from hvdtrain.runtime.mesh import key_of_degree
from tests.support.faults import ElasticJob, assert_same_curve, pause
from tests.support.runs import CORPUS, metrics, run

MODEL = (
    "--model.layers 2 --model.width 32 --model.heads 2 --model.context 32 --model.mlp swiglu"
    f" --model.norm rms --data.train {CORPUS} --batch.global_size 8 --batch.micro_size 2"
    " --telemetry.port 0 --schedule.name constant --eval.every 10 --train.replica_check_every 5"
    " --train.log_every 1 --task language_model --optim.name adamw --checkpoint.every 1000"
)
FOUR, MOST_STEPS = 4, 150

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """metrics.jsonl of one undisturbed process that holds the whole model."""
    root = tmp_path_factory.mktemp("curve")
    flags = f"{MODEL} --train.duration {MOST_STEPS} --run.root {root} --run.id case"
    done = run(root / "output", flags.split(), timeout=200)
    assert done.returncode == 0, done
    return metrics(root / "case")


FAULTS: dict[str, Callable[[ElasticJob], None]] = {
    "kill rank 0": lambda job: job.kill(job.numbers("node1")[0]),
    "stop one for ever": lambda job: job.stop(job.numbers("node2")[0]),
    "kill all of a host": lambda job: job.kill_processes_of("node2"),
}


@pytest.mark.parametrize(
    ("axis", "faults", "again"),
    [
        ("tensor", ["kill rank 0", "kill all of a host"], True),
        ("pipeline", ["stop one for ever"], True),
        ("shard", ["kill rank 0"], False),
    ],
)
def test_lost_rank_or_host_costs_no_step_if_a_replica_survives(
    job: Callable[..., ElasticJob],
    curve: list[dict[str, Any]],
    record_property: Callable[[str, object], None],
    axis: str,
    faults: list[str],
    again: bool,
) -> None:
    """`again`: the run ends when all ranks train again; otherwise while a spare process waits."""
    running = job(arguments=f"{MODEL} --{key_of_degree(axis)} 2", min_np=2)
    since: dict[str, float] = {}
    for fault in faults:
        running.wait_for_world(FOUR, 90)
        running.wait_for_more(3, 30)
        since[fault] = time.time()
        FAULTS[fault](running)
        running.wait_for_start(time.time(), 40)
    if again:
        running.wait_for_world(FOUR, 90)
    running.wait_for_more(3, 30)
    done = running.end()
    record_property("seconds", {f: round(pause(running.lines(), t), 2) for f, t in since.items()})
    assert "Traceback" not in done.stderr, done
    assert_same_curve(running.lines(), curve)
    starts = running.events("start")
    logs = "".join(path.read_text() for path in sorted(running.run.glob("logs/*")))
    assert {start["source"] for start in starts[1:]} == {"memory"}, f"{starts}\n{done}\n{logs}"
    assert not (running.run / "left_metrics.jsonl").exists(), "a step was done twice"


def test_no_step_is_lost_when_a_rank_dies_while_ranks_agree_on_it(
    job: Callable[..., ElasticJob], curve: list[dict[str, Any]]
) -> None:
    task = "--task tests.support.interrupted_transfers:DyingReplica"
    die = {"HVDTRAIN_TEST_DIE": "3:before:5,4:after:3"}
    running = job(arguments=f"{MODEL} {task} --parallel.tensor 2", min_np=2, env=die)
    running.wait_for_step(1)
    running.wait_until(lambda: len(_failed_after(running)) == 2, 90, "two failures")
    running.wait_for_more(2, 30)
    running.end()
    assert_same_curve(running.lines(), curve)
    starts = running.events("start")
    assert {start["source"] for start in starts[1:]} == {"memory"}, starts
    joined = next(start["step"] for start in starts if start["cause"] == "hosts")
    # Before it no rank has stepped; after it, in the third step of process 4, all ranks can.
    assert _failed_after(running) == [4, joined + 3], starts
    assert not (running.run / "left_metrics.jsonl").exists(), "a step was done twice"


@pytest.mark.soak
def test_deferred_update_is_applied_once_if_state_transfer_is_aborted(
    job: Callable[..., ElasticJob], curve: list[dict[str, Any]]
) -> None:
    task = "--task tests.support.interrupted_transfers:DyingReplica"
    die = {"HVDTRAIN_TEST_DIE": "3:after:3,1:late:3,0:transfer:1"}
    running = job(arguments=f"{MODEL} {task} --parallel.tensor 2", min_np=2, env=die)
    running.wait_for_step(8)
    running.end()
    assert_same_curve(running.lines(), curve)
    assert running.events("start")[1]["source"] == "memory"


@pytest.mark.soak
def test_run_reports_the_lost_steps_if_all_holders_of_a_shard_die(
    job: Callable[..., ElasticJob], curve: list[dict[str, Any]]
) -> None:
    running = job(arguments=f"{MODEL} --parallel.tensor 2", min_np=2)
    running.wait_for_step(3)
    running.kill(1, 3)
    start = running.wait_for_start(time.time(), 60)
    assert start["source"] == "new" and start["lost_step"] >= 3, start
    running.wait_for_more(2, 30)
    done = running.end()
    assert_same_curve(running.lines(), curve)
    assert "is replaced by a new process: it had shard 0" in done.stderr
    assert "had shard 0" not in done.stderr.replace(
        "is replaced by a new process: it had shard", ""
    )
    assert re.search(r"from step \d+ the run returns to its start", done.stderr)


def _failed_after(job: ElasticJob) -> list[int]:
    return [start["step"] for start in job.events("start") if start["cause"] == "failure"]
