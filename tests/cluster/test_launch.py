"""`hvdtrain launch` between two hosts: a run recovers from each fault."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hvdtrain.launch import mpi
from tests.support import runs as local
from tests.support.cluster import Cluster, Process
from tests.support.job import poll
from tests.support.scripts import misuse
from tests.support.supervised import ALL, EVERY, HOSTS, TEST_SECONDS, Record, Supervised

pytestmark = pytest.mark.timeout(TEST_SECONDS + 120)


@pytest.mark.soak
def test_added_host_that_cannot_train_is_excluded(cluster: Cluster, runs: Path) -> None:
    data = cluster.file("node1", "/tmp/only-here")
    data.write_bytes(local.CORPUS.read_bytes())
    hostfile = runs / "hostfile"
    hostfile.write_text("node1 slots=1\n")
    model = " ".join(local.TINY).replace(str(local.CORPUS), "/tmp/only-here")
    supervised = Supervised(
        cluster, runs, f"--hostfile {hostfile}", f"{model} --train.duration 9999"
    )
    supervised.wait_for_step(5)
    hostfile.write_text("node1 slots=1\nnode2 slots=1\n")
    supervised.job.wait_for("more hosts respond", 60)
    supervised.job.wait_for("node2 is excluded for a while", 60)
    reached = supervised.lines()[-1]["step"]
    supervised.wait_for_step(reached + 5)
    os.kill(supervised.supervisor(), signal.SIGTERM)
    assert supervised.job.wait(20).returncode == 75
    assert [start["world_size"] for start in supervised.starts()] == [1, 1]


@pytest.mark.soak
def test_run_ends_after_three_failed_attempts_and_shows_the_error(
    cluster: Cluster, runs: Path
) -> None:
    failing = "--task tests.support.tasks:Failing --batch.global_size 2"
    hosts, fail = "--hosts node1:1,node2:1", {"HVDTRAIN_TEST_FAIL": "1:5"}
    supervised = Supervised(cluster, runs, hosts, failing, fail)
    done = supervised.job.wait(TEST_SECONDS)
    assert done.returncode == 1, done
    assert len(supervised.starts()) == 3, done
    reason = "ended with exit code 1: it failed 3 times in a row after step 4"
    end = done.stderr.partition(reason)[2]
    assert "rank 1 on node2: RuntimeError: injected failure" in end, done


@pytest.mark.soak
def test_host_that_kills_its_ranks_is_avoided_while_another_suffices(
    cluster: Cluster, runs: Path
) -> None:
    hosts, killed = "--hosts node1:1,node2:1", set[int]()
    first = Supervised(cluster, runs, f"{hosts} --controller gloo")
    for _ in range(2):
        poll(lambda: any(p.pid not in killed for p in cluster.ranks("node2")), 30, "a rank")
        if killed:
            time.sleep(5)  # ranks that end together are one incident
        found = cluster.ranks("node2")
        cluster.kill(found)
        killed.update(process.pid for process in found)
    first.job.wait_for("node2 is used last from now on: rank killed from outside", 10)
    first.wait_for_step(1)
    assert not cluster.ranks("node2"), first.job.output()
    first.interrupt()

    following = Supervised(cluster, runs, hosts, name="next", env={"SLURM_JOB_ID": "7"})
    following.job.wait_for("starting 1 rank on node1:1 from step 0", 20)
    said = following.interrupt().stderr
    reason = "rank killed from outside, or out of memory (2 times, the last "
    assert f"node2 is avoided while other hosts suffice: {reason}" in said, said
    assert said.count("sbatch --exclude=node2") == said.count("node2 is ") == 1, said

    last = Supervised(cluster, runs, f"{hosts} --min-np 2", name="last")
    last.job.wait_for("starting 2 ranks on node1:1,node2:1 from step 0", 20)
    poll(lambda: bool(cluster.ranks("node2")), 20, "a rank on node2")
    said = last.interrupt().stderr
    assert f"node2 is suspect, but its slots are needed: {reason}" in said, said


@pytest.mark.soak
def test_script_without_hvdtrain_is_restarted_and_continues(cluster: Cluster, runs: Path) -> None:
    script = Path(misuse.__file__).with_name("plain_horovod.py")
    saved = runs / "saved.pt"
    launch = "python -m hvdtrain.cli launch --hosts node1:1,node2:1 -- python"
    command = f"cd {runs} && exec {launch} {script} {saved} 0.1"  # it writes runs/ there
    job = cluster.start("node1", ["sh", "-c", command])
    job.wait_for("STEP 5 ", 60)
    ranks = [p for p in cluster.processes("node2") if p.command.split()[1:2] == [str(script)]]
    assert ranks
    cluster.kill(ranks)
    done = job.wait(TEST_SECONDS)
    assert done.returncode == 0, done
    assert "its steps are not known" in done.stderr and "restarting in 1 s" in done.stderr, done
    assert "hvdtrain launch: finished" in done.stderr, done
    steps = [int(number) for number in re.findall(r"STEP (\d+) ", done.stdout)]
    # One step may be lost with rank 0's file.
    assert sorted({*steps}) == [*range(40)] and len(steps) <= 41, steps


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
    assert done.seconds < 5, done  # the timeout is 2; a busy machine needs more
    assert cluster.run("node1", command).stdout == "node1:1\nnode2:2\n"


@pytest.fixture(scope="module")
def one_run(two_hosts: Cluster) -> Iterator[Supervised]:
    """One run for the tests below, one after another."""
    root = two_hosts.shared / "launch"
    root.mkdir()
    one_run = Supervised(two_hosts, root)
    yield one_run
    one_run.job.kill()
    two_hosts.kill(two_hosts.ranks())


def _kill_first_rank(cluster: Cluster) -> None:
    cluster.kill(cluster.ranks("node1")[:1])


# The launchers of the MPIs, and their daemons on other hosts.
MPI_PROGRAMS = (
    *("mpirun", "orted", "prted", "mpiexec.hydra"),
    *("hydra_pmi_proxy", "hydra_bstrap_proxy"),
)


def _of_mpi(processes: Sequence[Process]) -> list[Process]:
    return [p for p in processes if Path(p.command.partition(" ")[0]).name in MPI_PROGRAMS]


def _kill_ranks_and_daemon(cluster: Cluster) -> None:
    daemons = _of_mpi(cluster.processes("node2"))
    assert daemons
    cluster.kill([*daemons, *cluster.ranks("node2")])


def _freeze_and_cut(cluster: Cluster) -> None:
    """Freeze the processes and cut the link: no connection is closed, mpirun does not detect it,
    and one rank would not end by itself."""
    for process in [*_of_mpi(cluster.processes("node1")), cluster.ranks("node2")[0]]:
        os.kill(process.pid, signal.SIGSTOP)
    cluster.link("node2", up=False)


KILLS: dict[str, Callable[[Cluster], None]] = {
    "first-rank": _kill_first_rank,
    "ranks-and-daemon": _kill_ranks_and_daemon,
}


@pytest.mark.parametrize(
    "fault", [pytest.param(n, marks=pytest.mark.soak) if "daemon" in n else n for n in KILLS]
)
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
    if fault == "first-rank":  # mpirun does not name a host whose daemon has ended, too
        assert supervised.incidents(fault_at) == [("node1", "killed")], supervised.job.output()


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
    for process in [*_of_mpi(cluster.processes()), *cluster.ranks()]:
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
        supervised.job.wait_for("no response from node2; the run continues", 15)
        time.sleep(7)  # longer than a host may be silent without a step
    finally:
        os.kill(sshd, signal.SIGCONT)
        cluster.resolve(cluster.names)
    supervised.wait_for_step(supervised.last()["step"] + 10)
    assert not supervised.world_sizes(began), supervised.job.output()
    assert supervised.last()["step"] > step + EVERY
    supervised.check_curve(undisturbed)


# Both hosts train again afterwards, because each test begins with both.
HOST_FAULTS: dict[str, tuple[Callable[[Cluster], None], Callable[[Cluster], None]]] = {
    "host": (lambda cluster: cluster.kill_host("node2"), lambda cluster: cluster.boot("node2")),
    "link-and-launcher": (_freeze_and_cut, lambda cluster: cluster.link("node2", up=True)),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(n, marks=pytest.mark.soak) if "link" in n else n for n in HOST_FAULTS]
)
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
    poll(lambda: ALL in supervised.world_sizes(fault_at), 60, "the start on both hosts")
    record_property("used_again_seconds", round(supervised.starts()[-1]["time"] - back_at, 1))
    # On a busy machine node2 may be late again when it is about to be used.
    assert supervised.world_sizes(fault_at) in ([1, ALL], [1, 1, ALL]), supervised.job.output()
    assert supervised.incidents(fault_at) == [("node2", "silent")], supervised.job.output()
    supervised.check_curve(undisturbed)
    supervised.check_recovery(seconds, lost, record_property)


@pytest.mark.soak
def test_run_resumes_on_another_host_after_the_supervisors_host_dies(
    supervised: Supervised, undisturbed: list[float], record_property: Record
) -> None:
    supervised.train_on(ALL)
    cluster = supervised.cluster
    cluster.kill_host("node1")
    try:
        died_at = time.time()
        if mpi.of_launcher().is_open_mpi:  # else the next start ends them
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


@pytest.mark.soak
def test_supervisor_waits_for_enough_hosts(one_run: Supervised, undisturbed: list[float]) -> None:
    supervised, started_at = one_run, time.time()
    if supervised.job.running():
        supervised.interrupt()
    supervised.start(more=f"--min-np {ALL}")
    supervised.train_on(ALL)
    cut_at = time.time()
    supervised.cluster.link("node2", up=False)
    try:
        supervised.job.wait_for("waiting for hosts: only node1:1 responds", 30)
    finally:
        supervised.cluster.link("node2", up=True)
    supervised.recovery(cut_at)
    assert supervised.world_sizes(started_at) == [ALL, ALL]
    supervised.check_curve(undisturbed)


@pytest.mark.soak
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
    assert supervised.starts()[-1]["step"] == reached  # no step was done twice
