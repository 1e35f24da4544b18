"""A script with its own loop on two hosts: killed ranks cost no step, by ssh and by agents."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGUSR1, Signals
from typing import Any

import pytest

from hvdtrain.audit.report import audit
from tests.support import namespaces, runs, warm
from tests.support.cluster import Cluster
from tests.support.job import Finished, Job, poll
from tests.support.scripts import misuse

SCRIPT = Path(misuse.__file__).parent / "regression.py"
PORTED = runs.REPOSITORY / "docs" / "porting"
FLAGS = [
    *("--telemetry.port", "0", "--exchange.name", "exact", "--runtime.threads", "1"),
    *("--checkpoint.every", "1000"),
]
SIZES = ["--train.duration", "90", "--batch.global_size", "12", "--batch.micro_size", "2"]
PACE = 0.15  # seconds of pause in each step
SECONDS = 120
ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HVDTRAIN_TEST_PACE": str(PACE)}
Start = Callable[[Cluster, list[str]], list[Job]]
Fault = tuple[str, int, Signals]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = namespaces.why_not()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"the cluster tests must run in CI: {reason}")
    if reason:
        pytest.skip(reason)
    with Cluster(["node1", "node2"]) as cluster:
        yield cluster


def alone(root: Path, command: list[str]) -> Finished:
    """Run a script in one process, as run `a`."""
    argv = [*command[1:], "--run.root", str(root), "--run.id", "a"]
    done = runs.start(root, argv, command=[warm.python(1)]).wait(SECONDS)
    assert done.returncode == 0, done
    return done


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run of one process, and the last line that it prints."""
    root = tmp_path_factory.mktemp("undisturbed")
    done = alone(root, [sys.executable, str(SCRIPT), *FLAGS, *SIZES])
    return root / "a", next(line for line in done.stdout.splitlines() if "END" in line)


def by_horovodrun(cluster: Cluster, command: list[str]) -> list[Job]:
    elastic = ["horovodrun", "--gloo", "-np", "3", "--min-np", "1", "-H", "node1:2,node2:1"]
    return [cluster.start("node1", [*elastic, *command], ENV)]


def by_agents(cluster: Cluster, command: list[str]) -> list[Job]:
    jobs = []
    for number, (host, slots) in enumerate({"node1": "2", "node2": "1"}.items()):
        task = {"PMI_RANK": str(number), "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}
        launch = [sys.executable, "-m", "hvdtrain.cli", "launch", "--slots", slots, "--"]
        jobs.append(cluster.start(host, [*launch, *command], ENV | task, cwd=cluster.shared))
    return jobs


def train_with_faults(
    cluster: Cluster, start: Start, command: list[str], faults: list[Fault], code: int = 0
) -> tuple[Path, Finished]:
    """Send a signal to a rank of a host once that many steps are done; return run and output.

    All ranks train then. The run must end with `code`, and have continued on fewer ranks.
    """
    root = cluster.shared / f"{Path(command[1]).stem}-{start.__name__}"
    jobs = start(cluster, [cluster.forked, *command, "--run.root", str(root), "--run.id", "a"])

    def trained(step: int) -> bool:
        lines = runs.metrics(root / "a")
        return len(lines) >= step and lines[-1]["world_size"] == 3

    for host, step, number in faults:
        poll(lambda: trained(step), SECONDS, f"{step} steps: {jobs[0].output()}")  # noqa: B023
        found = [
            process
            for process in cluster.processes(host)
            if re.match(rf"\S*python\S* {command[1]}", process.command)
        ]
        assert found
        os.kill(found[0].pid, number)
        time.sleep(0.5)
    done = [job.wait(SECONDS) for job in jobs]
    assert [one.returncode for one in done] == [code] * len(jobs), done
    assert len({line["world_size"] for line in runs.metrics(root / "a")}) > 1
    return root / "a", done[0]


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def values(run: Path, *names: str) -> list[list[float]]:
    return [[line[name] for name in ("step", *names)] for line in runs.metrics(run)]


@pytest.mark.parametrize("start", [pytest.param(by_horovodrun, marks=pytest.mark.soak), by_agents])
def test_script_loses_no_step_and_no_value_to_faults(
    cluster: Cluster, undisturbed: tuple[Path, str], start: Start
) -> None:
    command = [sys.executable, str(SCRIPT), *FLAGS, *SIZES]
    # Rank 0 dies, then the only rank of its host hangs; then a rank is asked to stop.
    faults = [("node1", 10, SIGKILL), ("node2", 25, SIGSTOP), ("node1", 40, SIGUSR1)]
    run, _ = train_with_faults(cluster, start, command, faults, code=75)
    done = alone(run.parent, command)  # resumed by one process
    assert audit(run).clean
    starts = [line for line in events(run) if line["event"] == "start"]
    assert [line["cause"] for line in starts].count("failure") >= 2, starts
    expected, end = undisturbed
    names = ("loss", "grad_norm", "mae", "lr")
    assert values(run, *names) == values(expected, *names)
    # The best loss and the number of evaluations are registered state.
    assert end.split("END ")[1] == done.stdout.split("END ")[1].partition("\n")[0]


@pytest.mark.soak
@pytest.mark.parametrize("start", [by_horovodrun, by_agents])
@pytest.mark.parametrize(
    "name", ["digits", "elastic", "ddp", "imagenet", "benchmark", "trainer", "policy", "gan"]
)
def test_ported_script_loses_no_step_when_a_rank_is_killed(
    cluster: Cluster, tmp_path: Path, name: str, start: Start
) -> None:
    # The script as it is in docs/porting, with a pause in each step.
    script = cluster.shared / f"{name}.py"
    loop = "for step in training:\n"
    before, after = (PORTED / f"{name}.py").read_text().split(loop)
    indent = " " * (len(after) - len(after.lstrip()))
    script.write_text(f"{before}{loop}{indent}__import__('time').sleep({PACE})\n{after}")
    shutil.copy(PORTED / "images.py", cluster.shared)
    command = [sys.executable, str(script), *FLAGS, "--train.duration", "20"]
    if name == "imagenet":
        command += ["--images", str(cluster.shared / "images")]
    alone(tmp_path, command)
    run, _ = train_with_faults(cluster, start, command, [("node1", 8, SIGKILL)])
    assert audit(run).clean
    assert values(run, "loss", "grad_norm") == values(tmp_path / "a", "loss", "grad_norm")


class ElasticScript:
    """The script of docs/porting for Horovod's elastic API; it ends with 3 ranks.

    Rank 0 prints each batch with the number of ranks; a batch takes at least `PACE` seconds.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.path = cluster, cluster.shared / "elastic_horovod.py"
        text = (PORTED / "elastic_horovod.py").read_text()
        shown = "        hvd.rank() or print('BATCH', state.batch, hvd.size(), flush=True)\n"
        pause = f"        __import__('time').sleep({PACE})\n"
        text = text.replace("        if state.batch %", shown + pause + "        if state.batch %")
        # Hosts join after a commit, which the script makes after every tenth batch.
        until = "state.batch < 40 or hvd.size() < 3 or state.batch % 10 < 5"
        text = text.replace("state.batch < 200", until)
        self.path.write_text(text)
        self.command = [cluster.forked, sys.executable, str(self.path)]

    def processes(self, host: str) -> list[int]:
        rank = rf"\S*python\S* -m hvdtrain\.elastic\.horovod_script {self.path}"
        found = self.cluster.processes(host)
        return [process.pid for process in found if re.match(rank, process.command)]

    def wait_for(self, job: Job, sizes: list[int]) -> None:
        """Wait until batches were computed on these numbers of ranks, one after another."""
        poll(lambda: self.sizes(job.output())[-1:] == sizes[-1:], SECONDS, f"{sizes}")
        assert self.sizes(job.output()) == sizes

    def sizes(self, output: str) -> list[int]:
        """Return the numbers of ranks, without repetitions."""
        return [size for size, _ in groupby(size for _, size in self.batches(output))]

    def batches(self, output: str) -> list[tuple[int, int]]:
        """Return (batch, ranks) as printed."""
        lines = re.findall(r"BATCH (\d+) (\d+)", output)
        return [(int(batch), int(size)) for batch, size in lines]

    def check(self, jobs: list[Job]) -> None:
        """The job ends well, and each failure lost at most the batches since the last commit."""
        done = [job.wait(SECONDS) for job in jobs]
        assert [one.returncode for one in done] == [0] * len(jobs), done
        found = [batch for batch, _ in self.batches(done[0].stdout)]
        assert found[0] == 1 and found[-1] >= 40, found
        for before, after in pairwise(found):
            repeated = after % 10 == 1 and before - 10 < after <= before
            assert after == before + 1 or repeated, (before, after, done[0])


@pytest.mark.parametrize("start", [by_horovodrun, by_agents])
def test_unchanged_script_of_horovods_elastic_survives_kills(
    cluster: Cluster, start: Start
) -> None:
    script = ElasticScript(cluster)
    jobs = start(cluster, script.command)
    script.wait_for(jobs[0], [3])
    [only] = script.processes("node2")
    os.kill(only, SIGKILL)
    script.wait_for(jobs[0], [3, 2])
    poll(lambda: len(script.processes("node2")) == 1, SECONDS, "another process on node2")
    script.check(jobs)
    assert script.sizes(jobs[0].output()) == [3, 2, 3]


def test_unchanged_script_of_horovods_elastic_uses_an_added_host(cluster: Cluster) -> None:
    script, hosts = ElasticScript(cluster), cluster.shared / "hosts"
    hosts.write_text("node1:2\n")
    elastic = ["horovodrun", "--gloo", "-np", "2", "--min-np", "1", "--max-np", "3"]
    elastic += ["--host-discovery-script", f"cat {hosts}"]
    job = cluster.start("node1", [*elastic, *script.command], ENV)
    script.wait_for(job, [2])
    hosts.write_text("node1:2\nnode2:1\n")
    script.wait_for(job, [2, 3])
    # Without a failure no batch is repeated.
    done = job.wait(SECONDS)
    assert done.returncode == 0, done
    found = [batch for batch, _ in script.batches(done.stdout)]
    assert found == [*range(1, found[-1] + 1)], done
