"""`hvdtrain launch` between two hosts: a run recovers from each fault."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs as local
from tests.support.cluster import Cluster
from tests.support.job import Finished, Job, poll

# More than are done before the last test, which does the rest quickly.
STEPS = 900
EVERY = 20
# Of which most is the start of the ranks: on a machine where that takes longer, this does too.
# 8 to 14 s alone; here another test may start its ranks at the same time.
RECOVERY_SECONDS = 30
RECOVERY_STARTS = 2.5
# Starting all ranks twice on a busy machine, and the steps.
TEST_SECONDS = 150
COMMON = [
    *("--train.steps", str(STEPS), "--checkpoint.every", str(EVERY), "--eval.every", "0"),
    # As much for each rank: one that waits for another polls, under MPI.
    *("--batch.global_size", "3", "--batch.micro_size", "1", "--telemetry.port", "0"),
    # So slow that the loss does not become as small as what is lost in a sum.
    *("--optim.lr", "0.001"),
]

# Of the host that is lost there is more than one rank; the other ones cost time alone.
HOSTS = "--hosts node1:1,node2:2"
ALL = 3
SLOW = "--task tests.support.tasks:Slow"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HVDTRAIN_TEST_PACE": "0.1"}
# Three of the supervisor's looks at the run's files, a second apart, and a little.
PACE_SECONDS = 4.0
NO_PACE = {"HVDTRAIN_TEST_PACE": "0"}

Record = Callable[[str, object], None]

pytestmark = pytest.mark.timeout(TEST_SECONDS + 120)


@pytest.fixture(scope="module")
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[float]:
    """The losses of the same run on one rank, without a supervisor; the file has its STEPS."""
    root = tmp_path_factory.mktemp("undisturbed")
    task = ["--task", "tests.support.tasks:Regression", "--run.root", str(root), "--run.id", "a"]
    steps = ["--train.steps", str(request.module.STEPS)]
    done = local.run(root, [*task, *COMMON, *steps])
    assert done.returncode == 0, done
    return local.losses(root / "a")


class Supervised:
    """A supervised run on node1 and node2; its first supervisor is on node1.

    Attributes:
        run: its folder.
        job: the supervisor that was started last.
        host: where that is.
    """

    def __init__(
        self,
        cluster: Cluster,
        root: Path,
        options: str = HOSTS,
        task: str = SLOW,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.cluster, self.run = cluster, root / "case"
        self._options, self._train = options.split(), [*COMMON, *task.split()]
        self._train += ["--run.root", str(root), "--run.id", "case"]
        self.first_start = 0.0  # seconds from the command to its first step
        self.job = self.start(env=env)

    def start(
        self, host: str = "node1", more: str = "", env: Mapping[str, str] | None = None
    ) -> Job:
        """Starts a supervisor; `more` are options of its own."""
        launch = ["python", "-m", "hvdtrain.cli", "launch", *self._options, *more.split()]
        self.started_at, self.host = time.time(), host
        argv = [*launch, "--", *self._train]
        self.job = self.cluster.start(host, argv, ENVIRONMENT | dict(env or {}))
        return self.job

    def lines(self) -> list[dict[str, Any]]:
        return local.metrics(self.run) if (self.run / "metrics.jsonl").exists() else []

    def last(self) -> dict[str, Any]:
        """The last line; that of step 0 where there is none."""
        path = self.run / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        none = {"step": 0, "time": 0.0, "world_size": 0}
        return json.loads(whole.rpartition("\n")[2]) if whole else none

    def starts(self) -> list[dict[str, Any]]:
        return list(json.loads((self.run / "manifest.json").read_text())["starts"])

    def wait_for_step(self, step: int, timeout: float = 120) -> None:
        def reached() -> bool:
            assert self.job.running(), self.job.output()
            return bool(self.last()["step"] >= step)

        poll(reached, timeout, f"step {step}: {self.job.output()}")
        self.first_start = self.first_start or self.lines()[0]["time"] - self.started_at

    def train_on(self, ranks: int) -> None:
        """Waits for that many ranks, and for a step in the middle between two checkpoints.

        The supervisor has seen then how long this start's steps take.
        """

        def trains() -> bool:
            assert self.job.running(), self.job.output()
            last = self.last()
            if last["time"] < self.started_at or last["world_size"] != ranks:
                return False
            start = self.starts()[-1]["time"]
            first = next((line["time"] for line in self.lines() if line["time"] > start), math.inf)
            if last["time"] - first < PACE_SECONDS:
                return False
            return EVERY / 2 <= last["step"] % EVERY < EVERY * 3 / 4

        poll(trains, 120, f"{ranks} ranks: {self.job.output()}")
        self.first_start = self.first_start or self.lines()[0]["time"] - self.started_at

    def recovery(self, fault_at: float) -> tuple[float, int]:
        """Seconds from the fault to the first line of the next start, and steps done again."""
        poll(lambda: self.starts()[-1]["time"] > fault_at, 60, f"a start: {self.job.output()}")
        start = self.starts()[-1]

        poll(lambda: self.last()["time"] > start["time"], 60, f"a step: {self.job.output()}")
        first = next(line["time"] for line in self.lines() if line["time"] > start["time"])
        return first - fault_at, self.steps_again(fault_at)

    def steps_again(self, fault_at: float) -> int:
        """How many steps were done again after the fault."""
        last, start = next(
            pair for pair in itertools.pairwise(self.starts()) if pair[1]["time"] > fault_at
        )
        path = self.run / "left_metrics.jsonl"  # not there where all could save
        left = path.read_text().splitlines() if path.exists() else []
        lost = [json.loads(line) for line in left if line.endswith("}")]
        lost = [line for line in lost if last["time"] < line["time"] < start["time"]]
        return sum(line["step"] > start["step"] for line in lost)

    def check_recovery(self, seconds: float, lost: int, record: Record) -> None:
        """In time, compared with the first start, and at most the steps since a checkpoint lost."""
        record("recovery_seconds", round(seconds, 1))
        record("steps_again", lost)
        assert lost <= EVERY, f"{lost} steps were done again: {self.job.output()}"
        limit = max(RECOVERY_SECONDS, RECOVERY_STARTS * self.first_start)
        assert seconds <= limit, f"{seconds:.1f} s, not {limit:.1f}: {self.job.output()}"

    def finish(self, undisturbed: list[float]) -> Finished:
        """Starts it again, without a pause in any step: it does the rest, and ends with 0."""
        done = self.start(env=NO_PACE).wait(TEST_SECONDS)
        assert done.returncode == 0, done
        self.check_curve(undisturbed)
        assert self.last()["step"] == len(undisturbed)
        return done

    def check_curve(self, undisturbed: list[float]) -> None:
        """Each step until now once, and the losses of the undisturbed run."""
        lines = self.lines()
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        assert [line["loss"] for line in lines] == pytest.approx(
            undisturbed[: len(lines)], rel=1e-4
        )

    def interrupt(self) -> Finished:
        """As Ctrl-C does."""
        os.kill(self.supervisor(), signal.SIGINT)
        return self.job.wait(15)

    def world_sizes(self, since: float) -> list[int]:
        """Of the starts after a time."""
        return [start["world_size"] for start in self.starts() if start["time"] > since]

    def supervisor(self) -> int:
        """Its process id on this machine."""
        (found,) = [
            process.pid
            for process in self.cluster.processes(self.host, containing="hvdtrain.cli launch")
            if process.command.startswith("python")
        ]
        return found


def test_added_host_that_cannot_train_is_excluded(cluster: Cluster, runs: Path) -> None:
    data = cluster.file("node1", "/tmp/only-here")
    data.write_bytes(local.CORPUS.read_bytes())
    hostfile = runs / "hostfile"
    hostfile.write_text("node1 slots=1\n")
    model = " ".join(local.TINY).replace(str(local.CORPUS), "/tmp/only-here")
    supervised = Supervised(cluster, runs, f"--hostfile {hostfile}", f"{model} --train.steps 9999")
    supervised.wait_for_step(5)
    hostfile.write_text("node1 slots=1\nnode2 slots=1\n")
    supervised.job.wait_for("more hosts answer", 60)
    supervised.job.wait_for("node2 is left out for a while", 60)
    reached = supervised.lines()[-1]["step"]
    supervised.wait_for_step(reached + 5)
    os.kill(supervised.supervisor(), signal.SIGTERM)
    assert supervised.job.wait(20).returncode == 75
    assert [start["world_size"] for start in supervised.starts()] == [1, 1]


def test_run_ends_after_three_failed_attempts_and_shows_the_error(
    cluster: Cluster, runs: Path
) -> None:
    failing = "--task tests.support.tasks:Failing --batch.global_size 2"
    hosts, fail = "--hosts node1:1,node2:1", {"HVDTRAIN_TEST_FAIL": "1:5"}
    supervised = Supervised(cluster, runs, hosts, failing, fail)
    done = supervised.job.wait(TEST_SECONDS)
    assert done.returncode == 1, done
    assert len(supervised.starts()) == 3, done
    end = done.stderr.partition("the end, exit code 1: it failed 3 times in a row after step 4")[2]
    assert "rank 1 on node2: RuntimeError: injected failure" in end, done


@pytest.mark.parametrize("probe", ["tcp:22", "ssh"])
def test_discover_lists_exactly_the_reachable_hosts(cluster: Cluster, probe: str) -> None:
    command = ["python", "-m", "hvdtrain.cli", "discover", *HOSTS.split(), "--probe", probe]
    assert cluster.run("node1", command).stdout == "node1:1\nnode2:2\n"
    cluster.link("node2", up=False)
    try:
        done = cluster.run("node1", command)
    finally:
        cluster.link("node2", up=True)
    assert done.stdout == "node1:1\n"
    assert done.seconds < 5, done  # the timeout is 2; the rest is a busy machine's
    assert cluster.run("node1", command).stdout == "node1:1\nnode2:2\n"


@pytest.fixture(scope="module")
def one_run(two_hosts: Cluster) -> Iterator[Supervised]:
    """One run, to which the tests below do one thing after another."""
    root = two_hosts.shared / "launch"
    root.mkdir()
    one_run = Supervised(two_hosts, root)
    yield one_run
    one_run.job.kill()
    two_hosts.kill(two_hosts.ranks())


@pytest.fixture
def supervised(one_run: Supervised) -> Supervised:
    """That run, under a supervisor."""
    if not one_run.job.running():
        one_run.start()
    return one_run


def _kill_first_rank(cluster: Cluster) -> None:
    cluster.kill(cluster.ranks("node1")[:1])


def _kill_ranks_and_daemon(cluster: Cluster) -> None:
    daemons = [p for p in cluster.processes("node2") if p.command.startswith("orted")]
    assert daemons
    cluster.kill([*daemons, *cluster.ranks("node2")])


def _freeze_and_cut(cluster: Cluster) -> None:
    """Nobody says goodbye, mpirun does not notice, and one rank would not end by itself."""
    launchers = [p for p in cluster.processes("node1") if p.command.startswith("mpirun")]
    for process in [*launchers, cluster.ranks("node2")[0]]:
        os.kill(process.pid, signal.SIGSTOP)
    cluster.link("node2", up=False)


KILLS: dict[str, Callable[[Cluster], None]] = {
    "first-rank": _kill_first_rank,
    "ranks-and-daemon": _kill_ranks_and_daemon,
}


@pytest.mark.parametrize("fault", KILLS)
def test_fault_costs_only_the_steps_since_the_checkpoint(
    supervised: Supervised, undisturbed: list[float], fault: str, record_property: Record
) -> None:
    supervised.train_on(ALL)
    fault_at = time.time()
    KILLS[fault](supervised.cluster)
    seconds, lost = supervised.recovery(fault_at)
    assert supervised.world_sizes(fault_at) == [ALL]
    supervised.check_curve(undisturbed)
    supervised.check_recovery(seconds, lost, record_property)


def test_killed_supervisor_ends_its_ranks_and_its_run_resumes(
    supervised: Supervised, undisturbed: list[float], record_property: Record
) -> None:
    supervised.train_on(ALL)
    cluster = supervised.cluster
    os.kill(supervised.supervisor(), signal.SIGKILL)
    fault_at = time.time()
    poll(lambda: not cluster.ranks(), 10, "the ranks' end")
    record_property("ranks_gone_seconds", round(time.time() - fault_at, 1))
    fault_at = time.time()
    supervised.start()
    seconds, lost = supervised.recovery(fault_at)
    supervised.check_curve(undisturbed)
    supervised.check_recovery(seconds, lost, record_property)


def test_next_launch_replaces_the_frozen_ranks_of_a_killed_one(
    supervised: Supervised, undisturbed: list[float], record_property: Record
) -> None:
    supervised.train_on(ALL)
    cluster = supervised.cluster
    old = {process.pid for process in cluster.ranks()}
    daemons = [p for p in cluster.processes() if p.command.startswith(("mpirun", "orted"))]
    for process in [*daemons, *cluster.ranks()]:
        os.kill(process.pid, signal.SIGSTOP)
    os.kill(supervised.supervisor(), signal.SIGKILL)
    fault_at = time.time()
    supervised.start()
    seconds, lost = supervised.recovery(fault_at)
    assert not old & {process.pid for process in cluster.ranks()}
    supervised.check_curve(undisturbed)
    supervised.check_recovery(seconds, lost, record_property)


def test_run_survives_failed_probes_while_it_completes_steps(
    supervised: Supervised, undisturbed: list[float]
) -> None:
    supervised.train_on(ALL)
    cluster, began, step = supervised.cluster, time.time(), supervised.last()["step"]
    sshd = cluster.processes("node2", containing="sshd")[0].pid
    cluster.resolve(["node1"])
    os.kill(sshd, signal.SIGSTOP)
    try:
        supervised.job.wait_for("no answer from node2; the run continues", 15)
        time.sleep(7)  # longer than a host may be silent without a step
    finally:
        os.kill(sshd, signal.SIGCONT)
        cluster.resolve(cluster.names)
    supervised.wait_for_step(supervised.last()["step"] + 10)
    assert not supervised.world_sizes(began), supervised.job.output()
    assert supervised.last()["step"] > step + EVERY
    supervised.check_curve(undisturbed)


# Both hosts train again afterwards: each test begins so.
HOST_FAULTS: dict[str, tuple[Callable[[Cluster], None], Callable[[Cluster], None]]] = {
    "host": (lambda cluster: cluster.kill_host("node2"), lambda cluster: cluster.boot("node2")),
    "link-and-launcher": (_freeze_and_cut, lambda cluster: cluster.link("node2", up=True)),
}


@pytest.mark.parametrize("fault", HOST_FAULTS)
def test_run_continues_without_a_lost_host_and_uses_it_again(
    supervised: Supervised, undisturbed: list[float], fault: str, record_property: Record
) -> None:
    supervised.train_on(ALL)
    injure, heal = HOST_FAULTS[fault]
    fault_at = time.time()
    try:
        injure(supervised.cluster)
        seconds, lost = supervised.recovery(fault_at)
    finally:
        heal(supervised.cluster)
    back_at = time.time()
    poll(lambda: len(supervised.world_sizes(fault_at)) == 2, 60, "the start on both hosts")
    record_property("used_again_seconds", round(supervised.starts()[-1]["time"] - back_at, 1))
    assert supervised.world_sizes(fault_at) == [1, ALL]
    supervised.check_curve(undisturbed)
    supervised.check_recovery(seconds, lost, record_property)


def test_run_resumes_on_another_host_after_the_supervisors_host_dies(
    supervised: Supervised, undisturbed: list[float], record_property: Record
) -> None:
    supervised.train_on(ALL)
    cluster = supervised.cluster
    cluster.kill_host("node1")
    try:
        died_at = time.time()
        poll(lambda: not cluster.ranks(), 10, "the end of the ranks on the other host")
        record_property("ranks_gone_seconds", round(time.time() - died_at, 1))
        started_at = time.time()
        supervised.start("node2")
        seconds, lost = supervised.recovery(started_at)
        assert supervised.starts()[-1]["hosts"] == {"node2": [0, 1]}
        supervised.check_curve(undisturbed)
        supervised.check_recovery(seconds, lost, record_property)
    finally:
        cluster.boot("node1")


def test_interrupted_supervisor_ends_its_ranks(supervised: Supervised) -> None:
    supervised.wait_for_step(1)
    done = supervised.interrupt()
    assert done.returncode == 130, done
    assert not supervised.cluster.ranks()


def test_supervisor_waits_for_enough_hosts(one_run: Supervised, undisturbed: list[float]) -> None:
    supervised, started_at = one_run, time.time()
    if supervised.job.running():
        supervised.interrupt()
    supervised.start(more=f"--min-np {ALL}")
    supervised.train_on(ALL)
    cut_at = time.time()
    supervised.cluster.link("node2", up=False)
    try:
        supervised.job.wait_for("waiting for hosts: only node1:1 answers", 30)
    finally:
        supervised.cluster.link("node2", up=True)
    supervised.recovery(cut_at)
    assert supervised.world_sizes(started_at) == [ALL, ALL]
    supervised.check_curve(undisturbed)


def test_terminated_supervisor_saves_a_checkpoint_and_exits_with_75(
    supervised: Supervised, undisturbed: list[float]
) -> None:
    supervised.train_on(ALL)
    os.kill(supervised.supervisor(), signal.SIGTERM)
    done = supervised.job.wait(20)
    assert done.returncode == 75, done
    assert not supervised.cluster.ranks()
    reached = supervised.lines()[-1]["step"]
    supervised.finish(undisturbed)
    assert supervised.starts()[-1]["step"] == reached  # nothing was done twice
