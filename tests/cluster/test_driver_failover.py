"""Another agent's host replaces a driver that is gone: three hosts without sshd and without Slurm.

The hosts share a disk here, also while the network between them is cut. On a cluster whose cut
hosts lose the disk, too, they cannot renew or take the token, so they are in the position of the
hosts that are cut from the driver here.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.agent import driver_file
from hvdtrain.agent.agent import DRIVER_NAME
from hvdtrain.errors import EXIT_PREEMPTED
from hvdtrain.run_files import owner_token
from hvdtrain.run_files.owner_token import Token
from tests.support import namespaces, runs
from tests.support.agent_job import WAIT_SECONDS, DisturbedRun, undisturbed_losses
from tests.support.cluster import Cluster, Process
from tests.support.hanging_disk import HangingDisk
from tests.support.job import Job, poll

STEPS = 900
PACE = 0.1  # seconds per micro-batch: a step takes 0.2 s on 2 ranks
RECOVERY_SECONDS = 6.0
PAUSE_SECONDS = 1.5  # longest step while nothing is wrong, on a busy machine
DRIVER_TIMEOUT = 8
HOSTS = ["node1", "node2", "node3"]
CLI = [sys.executable, "-m", "hvdtrain.cli"]
TRAIN = [
    *("--task", "tests.support.tasks:SlowWhile", *runs.TINY, "--train.duration", str(STEPS)),
    *("--checkpoint.every", "100000", "--elastic.driver_timeout", str(DRIVER_TIMEOUT)),
]


class AgentJob(DisturbedRun):
    """A run of at most two ranks on three hosts with one slot each; the first task is on node3."""

    def __init__(
        self,
        cluster: Cluster,
        hosts: Sequence[str] = tuple(reversed(HOSTS)),
        disk: HangingDisk | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """Start a run.

        Args:
            hosts: whose tasks start now, the first one first.
            disk: holds the run directory.
            options: more options of the run.
        """
        self._options = options
        self.cluster = cluster
        self.root = cluster.shared / "runs" if disk is None else disk.path
        self.root.mkdir(exist_ok=disk is not None)
        self.slow = cluster.shared / "slow"
        self.slow.touch()
        self.run = (self.root if disk is None else disk.here) / "case"
        self.env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.env["HVDTRAIN_TEST_SLOW"] = f"{PACE}:{self.slow}"
        self.tasks = {host: self._launch(host, n) for n, host in enumerate(hosts)}

    def _launch(self, host: str, number: int) -> Job:
        task = {"PMI_RANK": str(number), "PMI_SIZE": str(len(HOSTS)), "MPI_LOCALRANKID": "0"}
        argv = [*CLI, "launch", "--slots", "1", "--max-np", "2", "--", *TRAIN]
        argv += ["--run.root", str(self.root), "--run.id", "case", *self._options]
        return self.cluster.start(host, argv, self.env | task)

    def start_agent(self, host: str) -> None:
        argv = [*CLI, "agent", "--slots", "1", "--run", str(self.run)]
        self.tasks[host] = self.cluster.start(host, argv, self.env)

    def output(self) -> str:
        return "".join(f"--- {host}\n{task.output()}" for host, task in self.tasks.items())

    def token(self) -> Token:
        token = owner_token.read(self.run / f"{owner_token.LAUNCH}owner")
        assert token is not None
        return token

    def driver(self) -> Process:
        """The process that drives the run now."""
        found = [p for p in self.cluster.processes(self.token().host) if _name(p) == DRIVER_NAME]
        assert found, self.output()
        return found[-1]

    def wait_for_record(self, is_so: Callable[[dict[str, Any] | None], bool], what: str) -> None:
        """Wait until the driver's record of the job, None before it starts ranks, is as wanted."""

        def found() -> bool:
            try:
                return is_so(json.loads((self.run / driver_file.STATE_NAME).read_text())["job"])
            except (OSError, ValueError):
                return False

        deadline = time.monotonic() + WAIT_SECONDS
        while not found():  # not `poll`: the fault must hit the next milliseconds
            assert time.monotonic() < deadline, f"{what}: {self.output()}"

    def wait_for_another_driver(self, before: Token) -> float:
        """Wait until another driver has published its address; return its unix time."""
        file = self.run / ".driver.json"

        def other() -> bool:
            return self.token().owner != before.owner and file.stat().st_mtime > began

        began = time.time()
        try:
            poll(other, WAIT_SECONDS, "another driver")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.output()}") from None
        return file.stat().st_mtime

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Make the run directory read-only on all hosts; open files can still be written."""
        run = str(self.run)
        for host, again in itertools.product(filter(self.cluster.is_up, HOSTS), (False, True)):
            how = ["-o", "remount,bind,ro", run] if again else ["--bind", run, run]
            assert self.cluster.run(host, ["mount", *how]).returncode == 0
        try:
            yield
        finally:
            for host in filter(self.cluster.is_up, HOSTS):
                self.cluster.run(host, ["umount", "--lazy", run])

    def longest_step(self, since: float) -> float:
        """The longest time between two steps since a unix time, in seconds."""
        times = [line["time"] for line in self.lines() if line["time"] > since - PAUSE_SECONDS]
        return max(after - before for before, after in itertools.pairwise(times))


def _name(process: Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return ""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return undisturbed_losses(tmp_path_factory.mktemp("undisturbed"), TRAIN)


def _check(reason: str | None) -> None:
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"the cluster tests must run in CI: {reason}")
    if reason:
        pytest.skip(reason)


def _start(
    hosts: Sequence[str] = tuple(reversed(HOSTS)), options: Sequence[str] = ()
) -> Iterator[AgentJob]:
    _check(namespaces.why_not())
    with Cluster(HOSTS, sshd=False) as cluster:
        yield AgentJob(cluster, hosts, options=options)


@pytest.fixture(scope="module")
def job() -> Iterator[AgentJob]:
    """One job for all tests below, one after another."""
    yield from _start()


@pytest.fixture
def own_job() -> Iterator[AgentJob]:
    """A job for one test."""
    yield from _start()


def check_no_pause(job: AgentJob, began: float, ranks: list[Process]) -> None:
    """Check that the ranks trained on as if nothing had happened since a unix time."""
    job.wait_for_world(2, time.time() + 1)
    assert job.cluster.ranks() == ranks
    assert job.longest_step(began) < PAUSE_SECONDS
    assert "continuing with" not in job.output()


def test_ranks_train_on_when_a_driver_without_ranks_dies(job: AgentJob) -> None:
    job.wait_for_world(2)
    assert job.token().host == "node3"
    ranks, before, began = job.cluster.ranks(), job.token(), time.time()
    assert {rank.host for rank in ranks} == {"node1", "node2"}
    job.cluster.kill_host("node3")
    published = job.wait_for_another_driver(before)
    assert published - began < RECOVERY_SECONDS
    check_no_pause(job, began, ranks)


def test_killed_driver_is_replaced_on_its_own_or_another_host(job: AgentJob) -> None:
    ranks, before, began = job.cluster.ranks(), job.token(), time.time()
    job.cluster.kill([job.driver()])
    assert job.wait_for_another_driver(before) - began < RECOVERY_SECONDS
    check_no_pause(job, began, ranks)


def test_stopped_driver_steps_down_when_it_continues(job: AgentJob) -> None:
    ranks, before, began, old = job.cluster.ranks(), job.token(), time.time(), job.driver()
    os.kill(old.pid, signal.SIGSTOP)
    try:
        job.wait_for_another_driver(before)
    finally:
        os.kill(old.pid, signal.SIGCONT)
    poll(lambda: old not in job.cluster.processes(old.host), 5, "the end of the old driver")
    assert "was taken over by" in job.output() or "could not be renewed" in job.output()
    check_no_pause(job, began, ranks)


def test_ranks_train_on_while_the_run_directory_is_read_only(job: AgentJob) -> None:
    ranks, before, began, old = job.cluster.ranks(), job.token(), time.time(), job.driver()
    with job.read_only():
        poll(lambda: old not in job.cluster.processes(old.host), 30, "the end of the driver")
        time.sleep(DRIVER_TIMEOUT + 3)
        assert job.cluster.ranks() == ranks, job.output()
    job.wait_for_another_driver(before)
    check_no_pause(job, began, ranks)


def _generations(job: AgentJob) -> int:
    found: dict[str, Any] = json.loads((job.run / driver_file.STATE_NAME).read_text())
    return int(found["job"]["generations"])


def test_ranks_in_a_rendezvous_continue_with_another_driver(job: AgentJob) -> None:
    before, began, driver = _generations(job), time.time(), job.driver()
    job.cluster.kill(job.cluster.ranks()[-1:])
    job.wait_for_record(lambda found: (found or {})["generations"] > before, "a generation")
    job.cluster.kill([driver])
    job.wait_for_world(2, began)
    assert _generations(job) > before + 1


def test_process_that_a_killed_driver_was_starting_is_started(job: AgentJob) -> None:
    began, driver = time.time(), job.driver()
    job.cluster.kill(job.cluster.ranks()[-1:])

    def starts(found: dict[str, Any] | None) -> bool:
        return any(p["state"] == "starting" for p in (found or {})["processes"])

    job.wait_for_record(starts, "the start of a process")
    job.cluster.kill([driver])
    job.wait_for_world(2, began)
    assert len(job.cluster.ranks()) == 2, "a process was started twice"


def test_survivor_continues_when_the_drivers_host_with_a_rank_dies(
    job: AgentJob, undisturbed: list[float]
) -> None:
    job.cluster.boot("node3")
    job.start_agent("node3")
    host = job.token().host
    assert job.cluster.ranks(host)
    began = time.time()
    job.cluster.kill_host(host)
    assert job.pause_since(began, 1) < RECOVERY_SECONDS, job.output()
    job.wait_for_world(2, began)
    job.check_curve(undisturbed, rel=2e-4)


@pytest.mark.soak
def test_hosts_cut_off_from_the_driver_end_their_ranks_and_return(
    job: AgentJob, undisturbed: list[float]
) -> None:
    """The driver's host continues alone: its ranks are the only ones that form a generation."""
    before = job.token()
    if not job.cluster.ranks(before.host):  # as at the start; hosts with ranks replace it first
        job.cluster.kill([job.driver()])
        job.wait_for_another_driver(before)
    before, began = job.token(), time.time()
    (other,) = {rank.host for rank in job.cluster.ranks()} - {before.host}
    job.cluster.link(before.host, up=False)
    job.wait_for_world(1, began)
    poll(lambda: not job.cluster.ranks(other), DRIVER_TIMEOUT + 25, f"the end of {other}'s rank")
    job.wait_for_world(1, time.time())
    poll(lambda: "continues on other hosts" in job.output(), 15, "an agent that waits")
    job.cluster.link(before.host, up=True)
    job.wait_for_world(2, time.time())
    assert job.token().owner == before.owner
    job.slow.unlink()
    for host in filter(job.cluster.is_up, HOSTS):
        done = job.tasks[host].wait(WAIT_SECONDS)
        assert done.returncode == 0, f"{host}: {done}"
    assert len(job.lines()) == STEPS
    job.check_curve(undisturbed, rel=2e-4)


@pytest.mark.soak
def test_ranks_train_on_when_a_driver_without_ranks_is_cut_off(
    own_job: AgentJob,
) -> None:
    own_job.wait_for_world(2)
    ranks, before, began = own_job.cluster.ranks(), own_job.token(), time.time()
    assert before.host == "node3" and not own_job.cluster.ranks("node3")
    own_job.cluster.link("node3", up=False)
    own_job.wait_for_another_driver(before)
    assert own_job.token().host in ("node1", "node2"), own_job.output()
    time.sleep(DRIVER_TIMEOUT)
    found = own_job.cluster.ranks("node1") + own_job.cluster.ranks("node2")
    assert found == ranks, own_job.output()
    check_no_pause(own_job, began, ranks)


@pytest.mark.soak
def test_run_starts_although_the_drivers_host_dies_as_ranks_start(
    own_job: AgentJob,
) -> None:
    own_job.wait_for_record(lambda found: found is not None, "the start of ranks")
    assert _generations(own_job) == 0
    began = time.time()
    own_job.cluster.kill_host("node3")
    assert own_job.wait_for_another_driver(own_job.token()) - began < RECOVERY_SECONDS
    own_job.wait_for_world(2)
    assert own_job.lines()[0]["step"] == 1
    assert "is given up" not in own_job.output()


@pytest.fixture
def patient_job() -> Iterator[AgentJob]:
    """A job whose ranks wait for a driver for longer than a driver waits for the directory."""
    yield from _start(options=["--elastic.driver_timeout", "60"])


def test_rank_may_die_while_the_run_directory_is_read_only(patient_job: AgentJob) -> None:
    """What the driver does then could not be recorded for another driver."""
    patient_job.wait_for_world(2)
    before, began, old = patient_job.token(), time.time(), patient_job.driver()
    with patient_job.read_only():
        patient_job.cluster.kill(patient_job.cluster.ranks()[-1:])
        poll(lambda: old not in patient_job.cluster.processes(old.host), 30, "the driver's end")
    patient_job.wait_for_another_driver(before)
    patient_job.wait_for_world(2, began)


@pytest.fixture
def early_job() -> Iterator[AgentJob]:
    """A job that waits for the task of node1."""
    yield from _start(("node3", "node2"))


@pytest.mark.soak
def test_run_starts_although_the_drivers_host_dies_before_it_starts_ranks(
    early_job: AgentJob,
) -> None:
    early_job.wait_for_record(lambda found: found is None, "a driver")
    time.sleep(3)  # until the other agent has registered
    early_job.cluster.kill_host("node3")
    early_job.wait_for_world(1)
    assert early_job.token().host == "node2"


@pytest.mark.soak
def test_tasks_exit_with_75_when_all_hosts_with_ranks_are_dead(own_job: AgentJob) -> None:
    own_job.wait_for_world(2)
    assert not own_job.cluster.ranks("node3")
    for host in ("node1", "node2"):
        own_job.cluster.kill_host(host)
    done = own_job.tasks["node3"].wait(DRIVER_TIMEOUT + 40)
    assert done.returncode == EXIT_PREEMPTED, done


@pytest.fixture
def hanging() -> Iterator[tuple[AgentJob, HangingDisk]]:
    """A job for one test, and the disk of its run directory."""
    _check(namespaces.why_not() or HangingDisk.why_not())
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no /dev/fuse: a container's host decides that")
    with Cluster(HOSTS, sshd=False) as cluster:
        disk = HangingDisk(cluster, HOSTS, cluster.shared / "runs")
        yield AgentJob(cluster, disk=disk), disk


def _check_that_ranks_train_on_without_directory(
    job: AgentJob, disk: HangingDisk, kill_driver: bool
) -> None:
    job.wait_for_world(2)
    ranks, before, began, old = job.cluster.ranks(), job.token(), time.time(), job.driver()
    with disk.without_response():
        if kill_driver:
            job.cluster.kill([old])
        poll(lambda: old not in job.cluster.processes(old.host), 30, "the end of the driver")
        time.sleep(DRIVER_TIMEOUT + 3)
        seconds = time.time() - began
    job.wait_for_another_driver(before)
    job.wait_for_world(2, time.time() + 1)
    assert job.cluster.ranks() == ranks, job.output()
    assert job.longest_step(began) < seconds / 2, job.output()
    assert "continuing with" not in job.output()


def test_ranks_train_on_without_driver_while_the_directory_hangs(
    hanging: tuple[AgentJob, HangingDisk],
) -> None:
    _check_that_ranks_train_on_without_directory(*hanging, kill_driver=True)


@pytest.mark.soak
def test_ranks_train_on_while_the_run_directory_hangs(
    hanging: tuple[AgentJob, HangingDisk],
) -> None:
    _check_that_ranks_train_on_without_directory(*hanging, kill_driver=False)
