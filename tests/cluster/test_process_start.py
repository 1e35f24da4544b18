"""Start and end of ranks on two hosts: environment, secrets and helper processes."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hvdtrain.launch.commands import elastic_horovodrun, horovodrun, mpirun
from tests.support.cluster import Cluster
from tests.support.faults import ElasticJob, TrainingJob, pause
from tests.support.job import poll

HELPED = "--task tests.support.tasks:WithHelpers"
SECRET = "only-for-whom-it-concerns"
HOSTS = "node1:1,node2:1"
PLAIN = horovodrun(2, [], HOSTS)
# Horovod is not used here: only the start of processes is tested.
SHOW = "import os; print(ascii([os.getcwd(), os.environ['ODD']]))"


@pytest.mark.alone
def test_killed_rank_with_a_helper_process_does_not_delay_the_others(
    cluster: Cluster, runs: Path, record_property: Callable[[str, object], None]
) -> None:
    arguments = f"{HELPED} --elastic.timeout_seconds 20"
    job = ElasticJob(cluster, runs, "node1:1 node2:2", np=3, arguments=arguments, python="python")
    try:
        job.wait_for_step(10)
        times = []
        for number in (2, 0):
            since = time.time()
            job.kill(number)
            job.wait_for_start(since, 30)
            job.wait_for_more(2, 10)
            times.append(pause(job.lines(), since))
            if number:
                job.wait_for_world(3, 60)
        record_property("seconds", [round(seconds, 2) for seconds in times])
        assert max(times) <= 1, f"{times} s without a step: {job.job.output()}"
        job.end()
    finally:
        job.job.kill()


def test_killed_launcher_ends_all_ranks_and_their_helpers(cluster: Cluster, runs: Path) -> None:
    job = TrainingJob(cluster, PLAIN, runs, HELPED, None, "python")
    try:
        job.wait_for_step(5)
        job.send(signal.SIGKILL)
        poll(lambda: not cluster.ranks(), 10, "the end of all ranks and helpers")
    finally:
        job.job.kill()


@pytest.mark.parametrize("host", [pytest.param("node1", marks=pytest.mark.soak), "node2"])
def test_killed_rank_sets_the_exit_code_and_leaves_no_helpers(
    cluster: Cluster, runs: Path, host: str
) -> None:
    job = TrainingJob(cluster, PLAIN, runs, HELPED, None, "python")
    try:
        job.wait_for_step(5)
        rank = cluster.ranks(host)[0]  # older than its helpers
        os.kill(rank.pid, signal.SIGKILL)
        done = job.job.wait(15)
    finally:
        job.job.kill()
    assert done.returncode == 128 + signal.SIGKILL, done
    assert not cluster.ranks(), "helpers are left"


LAUNCHERS = {
    "elastic": elastic_horovodrun(2, 2, 2, ["hvdtrain", "discover", "--hosts", HOSTS], []),
    "gloo": [PLAIN[0], "--disable-cache", *PLAIN[1:]],
    "horovodrun mpi": horovodrun(2, [], HOSTS, "mpi"),
    "mpirun": mpirun(2, [], hosts=HOSTS, exported=["WANDB_API_KEY"]),
}


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(n, marks=pytest.mark.soak) if "mpi" in n else n for n in LAUNCHERS],
)
def test_secrets_of_ranks_are_hidden_from_other_users(
    cluster: Cluster, runs: Path, launcher: str
) -> None:
    # The programs with which horovodrun finds interfaces also have its signing key.
    secrets = rf"{SECRET}|horovod\.runner\.task_fn\0."
    with _Reader(secrets.encode()) as reader:
        env = {"WANDB_API_KEY": SECRET}
        job = TrainingJob(cluster, LAUNCHERS[launcher], runs, "", env, "python")
        try:
            job.wait_for_step(3)
            keys = [
                psutil.Process(rank.pid).environ().get("WANDB_API_KEY") for rank in cluster.ranks()
            ]
        finally:
            job.job.kill()
            poll(lambda: not cluster.ranks(), 15, "the end of all ranks")
    assert keys == [SECRET, SECRET]
    assert reader.looks > 20
    assert not reader.found, f"every user can read: {reader.found}"


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_start_in_the_working_directory_with_the_environment(
    cluster: Cluster, runs: Path, shared: bool
) -> None:
    directory = runs / 'it\'s "here"; cd'
    if shared:
        directory.mkdir()
        seen = directory
    else:
        directory = Path("/tmp/on node1 alone")
        cluster.file("node1", str(directory)).mkdir()
        seen = Path(os.environ.get("HOME", "/root"))  # where ssh leads
    odd = "two\nlines, 'quotes\" $HOME `date` \\ and Ünïcode \udcff"
    done = cluster.run("node1", [*PLAIN, "python", "-c", SHOW], {"ODD": odd}, cwd=directory)
    assert done.returncode == 0, done
    assert f"{[str(directory), odd]!a}" in done.stdout, done
    assert f"[1]<stdout>:{[str(seen), odd]!a}" in done.stdout, done


class _Reader:
    """Another user of this machine, who reads all command lines repeatedly.

    Attributes:
        looks: number of reads of all command lines.
        found: command lines that match `secrets`, a regular expression.
    """

    def __init__(self, secrets: bytes) -> None:
        self._secrets = re.compile(secrets)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.looks = 0
        self.found: set[bytes] = set()

    def __enter__(self) -> _Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(10)

    def _read(self) -> None:
        while not self._end.wait(0.02):
            for command in _command_lines():
                if self._secrets.search(command):
                    self.found.add(command[:200])
            self.looks += 1


def _command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:
            continue
