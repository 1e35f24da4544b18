"""The elastic job of `hvdtrain deploy kubernetes`: its containers as plain processes on hosts.

There is no Kubernetes: the test acts as its Job controller.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvdtrain import cli
from hvdtrain.errors import EXIT_PREEMPTED
from tests.support import namespaces
from tests.support.cluster import Cluster
from tests.support.faults import PACED, assert_clean
from tests.support.job import Job, poll
from tests.support.kubernetes import Pods

OPTIONS = "--name train --nodes 2 --ranks 1 --min-nodes 1 --max-nodes 3"
SECONDS = 120

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Hosts with the names of pods; the third one is off."""
    reason = namespaces.why_not()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"the cluster tests must run in CI: {reason}")
    if reason:
        pytest.skip(reason)
    with Cluster(["train-0", "train-1", "train-2"]) as cluster:
        cluster.kill_host("train-2")
        yield cluster


@pytest.fixture
def pods(cluster: Cluster) -> Pods:
    keys = [*PACED.split(), "--run.root", str(cluster.shared)]
    out = cluster.shared / "kubernetes"
    assert cli.main(["deploy", "kubernetes", *OPTIONS.split(), f"--out={out}", "--", *keys]) == 0
    text = (out / "overlays/elastic/job.yaml").read_text()
    service, job = yaml.safe_load_all(text)
    env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HVDTRAIN_TEST_PACE": "0.05"}
    return Pods(cluster, job, service, env)


def lines(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, without an incomplete line."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def test_changing_pods_cost_no_step_and_the_job_resumes(cluster: Cluster, pods: Pods) -> None:
    run = cluster.shared / "train"

    def trains_on(ranks: int, job: Job) -> None:
        began = time.time()

        def so() -> bool:
            assert job.running(), job.wait(5)
            last = [line for line in lines(run)[-2:] if line["time"] > began]
            return len(last) == 2 and all(line["world_size"] == ranks for line in last)

        try:
            poll(so, SECONDS, f"steps on {ranks} ranks")
        except AssertionError as error:
            raise AssertionError(f"{error}: {job.output()}") from None

    first = pods.start(0)
    pods.start(1)
    trains_on(2, first)
    cluster.kill_host(pods.host(1))
    trains_on(1, first)
    added = pods.replace(2)
    trains_on(2, first)
    pods.terminate(2)
    assert added.wait(SECONDS).returncode == EXIT_PREEMPTED
    trains_on(1, first)
    starts = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    last = [e["cause"] for e in starts if e["event"] == "start"][-1]
    assert last == "hosts", f"{starts}: {first.output()}"
    pods.terminate(0)
    assert first.wait(SECONDS).returncode == EXIT_PREEMPTED, first.output()
    step = lines(run)[-1]["step"]
    again = pods.replace(0)
    trains_on(1, again)
    assert f"from the checkpoint of step {step}" in again.output()
    pods.terminate(0)
    assert again.wait(SECONDS).returncode == EXIT_PREEMPTED
    assert_clean(run)
    steps = [line["step"] for line in lines(run)]
    assert steps == list(range(1, len(steps) + 1)), "a gap or a double line"
