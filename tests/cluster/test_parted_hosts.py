"""Two hosts that cannot reach each other, while both reach the driver and the other hosts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support import namespaces, runs
from tests.support.agent_job import WAIT_SECONDS, DisturbedRun, undisturbed_losses
from tests.support.cluster import Cluster

STEPS = 700
HOSTS = ["node1", "node2", "node3"]
LAUNCH = [sys.executable, "-m", "hvdtrain.cli", "launch", "--slots", "1", "--"]
TRAIN = [
    *("--task", "tests.support.tasks:SlowWhile", *runs.TINY, "--train.duration", str(STEPS)),
    *("--checkpoint.every", "100000"),
]


class ThreeHosts(DisturbedRun):
    """A run of one rank on each of three hosts; the driver is on node3."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, root = cluster, cluster.shared / "runs"
        root.mkdir()
        self.slow = root / "slow"
        self.slow.touch()
        self.run = root / "case"
        env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env |= {"HVDTRAIN_TEST_SLOW": f"0.1:{self.slow}", "PMI_SIZE": str(len(HOSTS))}
        argv = [*LAUNCH, *TRAIN, "--run.root", str(root), "--run.id", "case"]
        self.tasks = {
            host: cluster.start(host, argv, env | {"PMI_RANK": str(number), "MPI_LOCALRANKID": "0"})
            for number, host in enumerate(reversed(HOSTS))
        }

    def output(self) -> str:
        return "".join(f"--- {host}\n{task.output()}" for host, task in self.tasks.items())


@pytest.fixture(scope="module")
def job() -> Iterator[ThreeHosts]:
    reason = namespaces.why_not()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"the cluster tests must run in CI: {reason}")
    if reason:
        pytest.skip(reason)
    with Cluster(HOSTS, sshd=False) as cluster:
        yield ThreeHosts(cluster)


@pytest.mark.slow
def test_run_continues_without_one_of_two_parted_hosts(job: ThreeHosts) -> None:
    """Without a decision of the driver, all ranks would end after 20 failed rendezvous."""
    job.wait_for_world(3)
    began = time.time()
    job.cluster.part("node1", "node2", leave=False)
    job.wait_for_world(2, began)
    output = job.output()
    assert output.count(" is left out and tried again in 60 s") == 1, output
    assert output.partition("cannot reach each other: ")[2].split()[0] in ("node1", "node2")
    steps = [line["step"] for line in job.lines()]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.soak
def test_host_that_was_left_out_returns(
    job: ThreeHosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job.cluster.part("node1", "node2", leave=True)
    job.wait_for_world(3, time.time())
    job.slow.unlink()
    for host, task in job.tasks.items():
        done = task.wait(WAIT_SECONDS)
        assert done.returncode == 0, f"{host}: {done}"
    undisturbed = undisturbed_losses(tmp_path_factory.mktemp("undisturbed"), TRAIN)
    assert len(job.lines()) == STEPS
    job.check_curve(undisturbed, rel=2e-4)
