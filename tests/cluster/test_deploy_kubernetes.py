"""The Job of `hvdtrain deploy kubernetes`: its containers as plain processes on hosts without sshd.

There is no Kubernetes: the test acts as its Job controller.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest
import yaml

from hvdtrain import cli
from hvdtrain.errors import EXIT_PREEMPTED
from hvdtrain.run_files import owner_token
from tests.support import namespaces
from tests.support.agent_job import WAIT_SECONDS, DisturbedRun
from tests.support.cluster import Cluster
from tests.support.faults import PACED, assert_clean
from tests.support.job import Job
from tests.support.kubernetes import Pods

OPTIONS = "--name train --nodes 2 --ranks 1"
HOSTS = ["train-0", "train-1", "train-2"]

pytestmark = pytest.mark.timeout(600)


class PodsRun(DisturbedRun):
    """A run in pods, one rank in each; the pod of index 2 does not exist at first."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.run = cluster, cluster.shared / "train"
        cluster.kill_host("train-2")
        keys = [*PACED.split(), "--checkpoint.every", "100000", "--run.root", str(cluster.shared)]
        out = cluster.shared / "kubernetes"
        deploy = ["deploy", "kubernetes", *OPTIONS.split(), f"--out={out}", "--", *keys]
        assert cli.main(deploy) == 0
        job = yaml.safe_load((out / "job.yaml").read_text())
        env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HVDTRAIN_TEST_PACE": "0.05"}
        self.pods = Pods(cluster, job, env)
        self.jobs = {index: self.pods.start(index) for index in (0, 1)}
        self._ended: list[Job] = []

    def output(self) -> str:
        pods = [*self._ended, *self.jobs.values()]
        return "".join(f"--- a pod\n{pod.output()}" for pod in pods)

    def driver(self) -> int:
        """The index of the pod that runs the driver."""
        token = owner_token.read(self.run / f"{owner_token.LAUNCH}owner")
        assert token is not None
        return HOSTS.index(token.host)

    def replace(self, index: int) -> None:
        if index in self.jobs:
            self._ended.append(self.jobs[index])
        self.jobs[index] = self.pods.replace(index)

    def check_evicted(self, index: int) -> None:
        done = self.jobs[index].wait(WAIT_SECONDS)
        assert done.returncode == EXIT_PREEMPTED, f"{done}\n{self.output()}"

    def check_saved(self) -> None:
        step = int(self.lines()[-1]["step"])
        assert (self.run / f"checkpoints/step_{step:08}").exists(), self.output()


@pytest.fixture(scope="module")
def run() -> Iterator[PodsRun]:
    """One run for all tests below, one after another."""
    reason = namespaces.why_not()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"the cluster tests must run in CI: {reason}")
    if reason:
        pytest.skip(reason)
    with Cluster(HOSTS, sshd=False) as cluster:
        yield PodsRun(cluster)


def test_pods_that_start_together_find_each_other(run: PodsRun) -> None:
    run.wait_for_world(2)
    drivers = run.output().count("drives this run: this process is the agent of its host")
    assert drivers == 1, run.output()


def test_run_survives_the_pod_of_the_driver_which_returns_as_agent(run: PodsRun) -> None:
    lost, began = run.driver(), time.time()
    run.pods.lose(lost)
    run.wait_for_world(1, began)
    run.replace(lost)
    run.wait_for_world(2, time.time())
    assert run.driver() == 1 - lost
    assert "is the agent of its host" in run.jobs[lost].output()


def test_added_pod_joins_and_evicted_pod_leaves_between_steps(run: PodsRun) -> None:
    run.replace(2)
    run.wait_for_world(3, time.time())
    run.pods.terminate(2)
    run.check_evicted(2)
    assert "train-2 leaves: its agent is asked to end" in run.output()
    run.wait_for_world(2, time.time())
    events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
    causes = [event["cause"] for event in events if event["event"] == "start"]
    assert causes[-1] == "hosts", f"{causes}: no rank was lost"


def test_evicted_driver_saves_and_the_pods_resume_together(run: PodsRun) -> None:
    run.pods.terminate(run.driver())
    for index in (0, 1):
        run.check_evicted(index)
    run.check_saved()
    step, began = run.lines()[-1]["step"], time.time()
    for index in (0, 1):
        run.replace(index)
    run.wait_for_world(2, began)
    assert f"from the checkpoint of step {step}" in run.output()


def test_deleted_job_saves_although_all_pods_are_evicted(run: PodsRun) -> None:
    for index in (0, 1):
        run.pods.terminate(index)
    for index in (0, 1):
        run.check_evicted(index)
    run.check_saved()
    assert_clean(run.run)
    steps = [line["step"] for line in run.lines()]
    assert steps == list(range(1, len(steps) + 1)), "a gap or a double line"
