"""A sharded optimizer on two hosts with killed ranks: no step is lost, or the loss is reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from hvdtrain.checkpoint.layout import finished
from tests.support.faults import PACED, ElasticJob, assert_same_curve, pause
from tests.support.runs import metrics, run

# With a constant rate the undisturbed run needs no more steps than the disturbed ones do.
CURVE = "--schedule.name constant --train.replica_check_every 5 --eval.every 10"
ZERO = f"{CURVE} --parallel.shard.stage 1"
FOUR, MOST_STEPS = 4, 400

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """metrics.jsonl of one undisturbed process with the whole optimizer."""
    root = tmp_path_factory.mktemp("curve")
    flags = f"{PACED} {CURVE} --train.duration {MOST_STEPS} --run.root {root} --run.id case"
    done = run(root / "output", flags.split(), env={"HVDTRAIN_TEST_PACE": "0"}, timeout=200)
    assert done.returncode == 0, done
    return metrics(root / "case")


def _assert_no_step_was_lost(
    running: ElasticJob, curve: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Wait until all ranks train again, end the run, and return its starts."""
    running.wait_for_world(FOUR, 90)
    running.wait_for_more(7, 30)
    running.end()
    assert_same_curve(running.lines(), curve)
    starts = running.events("start")
    assert {start["source"] for start in starts[1:]} == {"memory"}, starts
    assert not (running.run / "left_metrics.jsonl").exists(), "a step was done twice"
    return starts


def test_killed_rank_or_host_loses_no_shard_and_no_step(
    job: Callable[..., ElasticJob],
    curve: list[dict[str, Any]],
    record_property: Callable[[str, object], None],
) -> None:
    running = job(arguments=f"{ZERO} --parallel.shard.copies 2")
    running.wait_for_step(20)
    faults: dict[str, Callable[[], None]] = {
        "rank 0": lambda: running.kill(running.numbers()[0]),
        "host": lambda: running.kill_processes_of("node2"),
    }
    seconds = {}
    for fault, kill in faults.items():
        running.wait_for_world(FOUR, 90)
        running.wait_for_more(7, 30)
        since = time.time()
        kill()
        running.wait_for_start(time.time(), 40)
        seconds[fault] = round(pause(running.lines(), since), 2)
    record_property("seconds", seconds)
    _assert_no_step_was_lost(running, curve)


@pytest.mark.soak
def test_no_step_is_lost_when_a_rank_dies_while_ranks_agree_on_it(
    job: Callable[..., ElasticJob], curve: list[dict[str, Any]]
) -> None:
    task = "--task tests.support.interrupted_transfers:DyingInStep"
    running = job(arguments=f"{ZERO} {task}", env={"HVDTRAIN_TEST_DIE": "3:before:10,0:after:20"})
    running.wait_for_world(FOUR - 1, 90)
    running.wait_for_step(25, 60)
    starts = _assert_no_step_was_lost(running, curve)
    failed_after = [start["step"] for start in starts if start["cause"] == "failure"]
    # Before it no rank has stepped, and step 10 needs two; after it, in step 19, all have.
    assert failed_after == [9, 19], starts


def test_run_returns_to_a_checkpoint_if_the_only_copy_of_a_shard_dies(
    job: Callable[..., ElasticJob], curve: list[dict[str, Any]]
) -> None:
    running = job(arguments=f"{ZERO} --parallel.shard.copies 1 --checkpoint.every 10")
    running.wait_until(lambda: bool(finished(running.run / "checkpoints")), 90, "a checkpoint")
    running.wait_for_more(3, 30)
    running.kill(running.numbers("node2")[-1])
    start = running.wait_for_start(time.time(), 40)
    assert start["source"] == "checkpoint", start
    running.job.wait_for("the run returns to the checkpoint of step", 20)
    running.wait_for_world(FOUR, 90)
    running.wait_for_more(5, 30)
    done = running.end()
    assert_same_curve(running.lines(), curve)
    assert (running.run / "left_metrics.jsonl").exists(), done


def test_run_returns_to_its_start_if_a_shard_dies_before_a_checkpoint(
    job: Callable[..., ElasticJob], curve: list[dict[str, Any]]
) -> None:
    running = job(
        np=2,
        hosts="node1:1 node2:1",
        arguments=f"{ZERO} --parallel.shard.copies 1 --checkpoint.every 0",
        env={"HVDTRAIN_TEST_PACE": "0.05"},
    )
    running.wait_for_step(5)
    running.kill(1)
    running.job.wait_for("the run returns to its start", 60)
    running.wait_until(lambda: len(running.events("start")) > 1, 30, "second start")
    assert running.events("start")[1]["source"] == "new"
    running.wait_for_step(7)
    running.end()
    assert_same_curve(running.lines(), curve)
