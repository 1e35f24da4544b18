"""A run that borrows nodes of a real Slurm: no step is lost, however a node is taken back."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator

import pytest

from hvdtrain.report.metrics import borrowed
from hvdtrain.report.run import read
from tests.support import namespaces
from tests.support import slurm as support
from tests.support.agent_job import WAIT_SECONDS, undisturbed_losses
from tests.support.cluster import Cluster
from tests.support.job import poll
from tests.support.malleable import TRAIN, MalleableRun
from tests.support.slurm import Slurm

STEPS = 800
PACE = 0.12


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    train = [*TRAIN, "--train.duration", str(STEPS)]
    return undisturbed_losses(tmp_path_factory.mktemp("undisturbed"), train)


@pytest.fixture(scope="module")
def run(undisturbed: list[float]) -> Iterator[MalleableRun]:
    """One run for all tests below, one after another."""
    reason = namespaces.why_not() or support.why_not()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"the cluster tests must run in CI: {reason}")
    if reason:
        pytest.skip(reason)
    with Cluster(["node1", "node2", "node3"], sshd=False) as cluster:
        train = [*TRAIN, "--train.duration", str(STEPS), "--telemetry.port", "9855"]
        yield MalleableRun(cluster, Slurm(cluster), train, PACE)


def test_donor_lends_its_node_to_the_run(run: MalleableRun) -> None:
    run.wait_for_world(1)
    run.donor()
    run.wait_for_world(2)


def test_preempted_donor_leaves_between_two_steps(
    run: MalleableRun, undisturbed: list[float]
) -> None:
    before, second, began = run.log(), run.donor(), time.time()
    run.wait_for_world(3)
    job = run.rigid(1.0)
    run.slurm.wait(job, "COMPLETED", WAIT_SECONDS)
    run.wait_for_world(2, began)
    assert run.slurm.state(second) == "RUNNING", "the older donor was not preempted"
    run.check_one_left(before)
    run.check_curve(undisturbed)


@pytest.mark.soak
def test_donor_leaves_before_its_time_limit(run: MalleableRun, undisturbed: list[float]) -> None:
    before, began, job = run.log(), time.time(), run.donor("--time=1")
    run.wait_for_world(3, began)
    run.slurm.wait(job, "COMPLETED", WAIT_SECONDS)  # not TIMEOUT
    run.check_one_left(before)
    run.check_curve(undisturbed)


@pytest.mark.soak
def test_requeued_donor_leaves_and_lends_a_node_again(
    run: MalleableRun, undisturbed: list[float]
) -> None:
    before, began, job = run.log(), time.time(), run.donor()
    run.wait_for_world(3, began)
    run.slurm.run("scontrol", "requeue", str(job))
    poll(lambda: run.lines()[-1]["world_size"] == 2, WAIT_SECONDS, "a step without the node")
    run.check_one_left(before)
    run.wait_for_world(3, time.time())
    run.check_curve(undisturbed)


def test_donor_killed_without_notice_loses_no_step(
    run: MalleableRun, undisturbed: list[float]
) -> None:
    run.slurm.run("scancel", "--full", "--signal=KILL", "--partition=low")
    run.wait_for_world(1, time.time())
    run.check_curve(undisturbed)


def test_fill_lends_nodes_while_they_are_idle_until_the_run_ends(
    run: MalleableRun, undisturbed: list[float]
) -> None:
    fill, began = run.fill("--most", "8"), time.time()
    run.wait_for_world(3, began)
    job = run.rigid(5.0)
    run.wait_for_world(2, time.time())
    run.slurm.wait(job, "COMPLETED", WAIT_SECONDS)
    run.wait_for_world(3, time.time())
    argv = [sys.executable, "-m", "hvdtrain.cli", "top", str(run.run), "--once"]
    shown = run.cluster.run("node1", argv).stdout
    assert re.search(r"borrowed nodes 2   node-seconds used \d+, idle \d+   steps lost 0", shown)
    run.finish()
    assert fill.wait(WAIT_SECONDS).returncode == 0, fill.output()
    poll(lambda: not run.slurm.run("squeue", "--noheader").stdout, WAIT_SECONDS, "no donor")
    assert len(run.lines()) == STEPS
    run.check_curve(undisturbed, rel=2e-4)
    found = borrowed(read(run.run))
    assert found is not None and found["lost_steps"] == 0
    assert found["used_node_seconds"] > found["idle_node_seconds"] > 0
