"""Hosts that compute wrong gradients, among three: named, excluded and remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdtrain.run_files.host_records import WRONG, read_incidents
from tests.support import runs as local
from tests.support.cluster import Cluster
from tests.support.faults import ElasticJob, assert_clean
from tests.support.namespaces import why_not
from tests.support.supervised import Supervised

STEPS, EVERY = 40, 10
HOSTS = ["node1", "node2", "node3"]
TASK = (
    "--task tests.support.miscomputing:Miscomputing --batch.global_size 12 --batch.micro_size 2"
    f" --eval.every 0 --checkpoint.every {STEPS} --train.duration {STEPS} --optim.lr 0.01"
    f" --exchange.name exact --runtime.threads 1 --integrity.replay_every {EVERY}"
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with Cluster(HOSTS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the run of one process, without replays."""
    root = tmp_path_factory.mktemp("undisturbed")
    where = ["--run.root", str(root), "--run.id", "a", "--telemetry.port", "0"]
    done = local.run(root / "output", [*TASK.split(), *where])
    assert done.returncode == 0, done
    return root / "a"


@pytest.fixture
def start(three_hosts: Cluster, tmp_path: Path) -> Iterator[Callable[..., ElasticJob]]:
    jobs = []
    root = three_hosts.shared / tmp_path.name
    root.mkdir()

    def start(wrong: str) -> ElasticJob:
        where = " ".join(f"{host}:1" for host in HOSTS)
        env = {"HVDTRAIN_TEST_WRONG": wrong}
        jobs.append(ElasticJob(three_hosts, root, where, np=3, arguments=TASK, env=env))
        return jobs[-1]

    yield start
    for one in jobs:
        one.job.kill()
    three_hosts.kill(three_hosts.ranks())


@pytest.mark.parametrize("passes", ["1", pytest.param("all", marks=pytest.mark.soak)])
def test_wrong_host_is_excluded_and_no_parameter_changes(
    start: Callable[..., ElasticJob], undisturbed: Path, passes: str
) -> None:
    # With all, the bit also flips in the next micro-batches of this step.
    job = start(f"1:20:{passes}")
    done = job.ended(0, 150)
    named = "step 20: rank 1 on node2 computed a wrong gradient of micro-batch 1"
    assert done.stderr.count(named) == 1, done.stderr
    assert "node2 leaves: it computed a wrong gradient in step 20" in done.stderr, done
    lines = job.lines()
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    assert [line["world_size"] for line in lines] == [3] * 19 + [2] * (STEPS - 19)
    assert [line["loss"] for line in lines] == local.losses(undisturbed)
    assert local.weights(job.run, STEPS) == local.weights(undisturbed, STEPS)
    (event,) = job.events("replay")
    assert (event["verdict"], event["hosts"]) == ("wrong", ["node2"])
    assert "replay in step 20, wrong: node2" in assert_clean(job.run)


@pytest.mark.soak
def test_static_run_is_restarted_without_the_wrong_host(
    three_hosts: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    root = three_hosts.shared / tmp_path.name
    root.mkdir()
    hosts = "--hosts node1:1,node2:1,node3:1 --min-np 2"
    env = {"HVDTRAIN_TEST_WRONG": "node2:20:all"}
    supervised = Supervised(three_hosts, root, hosts, f"{TASK} --checkpoint.every 15", env)
    done = supervised.job.wait(150)
    assert done.returncode == 0, done.stderr
    named = "step 20: rank 1 on node2 computed a wrong gradient of micro-batch 1"
    assert named in done.stderr and "start again without node2" in done.stderr, done.stderr
    assert [start["hosts"] for start in supervised.starts()] == [
        {host: [rank] for rank, host in enumerate(HOSTS)},
        {"node1": [0], "node3": [1]},
    ]
    (incident,) = read_incidents(supervised.run / "hosts.json")
    assert (incident.host, incident.cause) == ("node2", WRONG)
    assert local.losses(supervised.run) == local.losses(undisturbed)
    assert local.weights(supervised.run, STEPS) == local.weights(undisturbed, STEPS)
