"""Two hosts, node1 and node2, for all tests in this directory."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.faults import PACED, ElasticJob
from tests.support.namespaces import why_not
from tests.support.runs import losses, metrics, run
from tests.support.supervised import COMMON, STEPS, Supervised


@pytest.fixture(scope="session")
def two_hosts() -> Iterator[Cluster]:
    reason = why_not()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"the cluster tests must run in CI: {reason}")
    if reason:
        pytest.skip(reason)
    with Cluster(["node1", "node2"]) as cluster:
        yield cluster


@pytest.fixture
def cluster(two_hosts: Cluster) -> Iterator[Cluster]:
    """The two hosts; a rank that outlives its test by 10 s is killed, and the test fails."""
    yield two_hosts
    deadline = time.monotonic() + 10
    while (left := two_hosts.ranks()) and time.monotonic() < deadline:
        time.sleep(0.1)
    two_hosts.kill(left)
    assert not left, f"ranks outlived the test: {left}"


@pytest.fixture
def runs(cluster: Cluster, request: pytest.FixtureRequest) -> Path:
    """An empty directory for this test's runs, which both hosts see."""
    # Include the file's name: two files may have a test of the same name.
    directory = cluster.shared / re.sub(r"\W+", "-", request.node.nodeid.rpartition("/")[2])
    directory.mkdir()
    return directory


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """metrics.jsonl of an undisturbed run of `PACED`: one process, no launcher."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # shared by all workers: the first of them does the run
    root = base / "reference"
    with (base / "reference.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            arguments = f"{PACED} --run.root {root} --run.id case".split()
            # The disturbed runs have the same schedule, so all their steps are done here.
            done = run(root / "output", arguments, env={"HVDTRAIN_TEST_PACE": "0"}, timeout=120)
            assert done.returncode == 0, done
    return metrics(root / "case")


@pytest.fixture
def job(cluster: Cluster, runs: Path) -> Iterator[Callable[..., ElasticJob]]:
    """Start elastic jobs on the two hosts, and end what a failed test leaves."""
    jobs = []

    def start(**arguments: object) -> ElasticJob:
        jobs.append(ElasticJob(cluster, runs, **arguments))  # type: ignore[arg-type]
        return jobs[-1]

    yield start
    for one in jobs:
        one.job.kill()


@pytest.fixture(scope="module")
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[float]:
    """Losses of the same run on one rank, without a supervisor; a file may set STEPS."""
    root = tmp_path_factory.mktemp("undisturbed")
    task = ["--task", "tests.support.tasks:Regression", "--run.root", str(root), "--run.id", "a"]
    steps = ["--train.duration", str(getattr(request.module, "STEPS", STEPS))]
    done = run(root, [*task, *COMMON, *steps])
    assert done.returncode == 0, done
    return losses(root / "a")


@pytest.fixture
def supervised(one_run: Supervised) -> Supervised:
    """The run of `undisturbed` under a supervisor."""
    if not one_run.job.running():
        one_run.start()
    return one_run
