"""`hvdtrain launch` without hosts: tasks of an allocation's launcher, and a run on one host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hvdtrain.agent.agent import DRIVER_NAME
from hvdtrain.errors import EXIT_PREEMPTED, UserError
from hvdtrain.run_files.owner_token import Claim
from hvdtrain.run_files.ownership import Ownership
from hvdtrain.supervise.allocation import HostTask, this_task
from tests.support import warm
from tests.support.job import Job, poll, running_children
from tests.support.runs import metrics

LAUNCH = [sys.executable, "-m", "hvdtrain.cli", "launch"]
TRAIN = ["--task", "tests.support.tasks:Paced", "--train.duration", "400", "--telemetry.port", "0"]
SECONDS = 90


@pytest.mark.parametrize(
    ("env", "task"),
    [
        ({}, (0, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 1)),  # of sbatch's script
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}, (2, 4)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, (1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, (1, 3)),
        ({"PBS_NODENUM": "1", "PBS_NODEFILE": "nodes"}, (1, 2)),  # pbsdsh
    ],
)
def test_task_is_recognized_by_the_variables_of_its_launcher(
    env: dict[str, str], task: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nodes").write_text("node1\nnode1\nnode2\n")
    assert this_task(env) == HostTask(*task)


def test_several_tasks_on_a_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PROCID", "1"), ("STEP_NUM_TASKS", "2"), ("LOCALID", "1")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(UserError, match="one per host"):
        this_task()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--controller", "mpi"], "--controller mpi requires hosts"),
        (["--hosts", "node1:2", "--slots", "2"], "--slots is for a launch without hosts"),
        (["--hosts", "node1:2", "--tls"], "--tls is for a launch without hosts"),
        (["--min-np", "3", "--max-np", "2"], "--max-np 2 is less than --min-np 3"),
    ],
)
def test_contradictory_options_are_refused(options: list[str], problem: str) -> None:
    argv = [*LAUNCH, *options, "--", "--run.id", "a"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    assert problem in done.stderr and done.stderr.count("\n") == 1


def test_second_driver_of_a_run_is_refused(tmp_path: Path) -> None:
    owner = Ownership(tmp_path / "a", ".launch.")
    owner.acquire(Claim.of_this_process())
    argv = [*LAUNCH, "--", "--run.root", str(tmp_path), "--run.id", "a"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS)
    owner.release()
    assert done.returncode == 2
    assert "another hvdtrain launch supervises this run" in done.stderr


class LocalRun:
    """`hvdtrain launch` of 2 ranks on this host, which are forked unless `fresh`."""

    def __init__(self, root: Path, fresh: bool = False) -> None:
        self.root = root
        self._prefix = [] if fresh else [warm.prefix(2)]
        self.directory = root / "a"

    def start(self, *flags: str) -> Job:
        self.job = self.launch("output", *flags)
        return self.job

    def launch(self, output: str, *more: str) -> Job:
        train = [*self._prefix, sys.executable, "-m", "hvdtrain.train", *TRAIN, *more]
        argv = [*LAUNCH, "--slots", "2", "--tls", "--", *train]
        argv += ["--run.root", str(self.root), "--run.id", "a"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HVDTRAIN_TEST_PACE": "0.02"}
        return Job([], argv, env, self.root / output)

    def steps(self) -> int:
        path = self.directory / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def wait_for_steps(self, count: int) -> None:
        def reached() -> bool:
            assert self.job.running(), self.job.output()
            return self.steps() >= count

        poll(reached, SECONDS, f"{count} steps: {self.job.output()}")


@pytest.fixture
def local_run(tmp_path: Path) -> Iterator[LocalRun]:
    run = LocalRun(tmp_path)
    run.start()
    yield run
    run.job.kill()


@pytest.mark.slow
def test_signals_save_and_end_the_run_or_end_it_at_once(local_run: LocalRun) -> None:
    local_run.wait_for_steps(3)
    local_run.job.send(signal.SIGTERM)
    done = local_run.job.wait(SECONDS)
    assert done.returncode == EXIT_PREEMPTED, done
    steps = local_run.steps()
    assert (local_run.directory / f"checkpoints/step_{steps:08}").exists()
    driver = json.loads((local_run.directory / ".driver.json").read_text())
    assert (driver["exit_code"], driver["secret"]) == (EXIT_PREEMPTED, "")

    local_run.start()
    local_run.wait_for_steps(steps + 3)
    assert [line["step"] for line in metrics(local_run.directory)][steps] == steps + 1
    began = time.monotonic()
    local_run.job.send(signal.SIGINT)
    done = local_run.job.wait(SECONDS)
    assert done.returncode == 128 + signal.SIGINT, done
    assert time.monotonic() - began < 15


def _children(run: LocalRun, name: str) -> list[psutil.Process]:
    return running_children(lambda process: process.name() == name, run.job.pid)


@pytest.mark.soak
@pytest.mark.slow
def test_task_exits_with_the_code_of_the_run_although_its_driver_is_killed(tmp_path: Path) -> None:
    run = LocalRun(tmp_path)
    run.start("--train.duration", "250")
    try:
        run.wait_for_steps(3)
        (first,) = _children(run, DRIVER_NAME)
        first.kill()
        poll(
            lambda: bool(set(_children(run, DRIVER_NAME)) - {first}),
            20,
            f"another driver: {run.job.output()}",
        )
        done = run.job.wait(SECONDS)
    finally:
        run.job.kill()
    assert done.returncode == 0, done
    assert "continuing with" not in done.stderr, "ranks noticed the end of the driver"
    assert run.steps() == 250


@pytest.mark.slow
def test_nothing_of_a_host_outlives_its_task(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, fresh=True)
    run.start()
    try:
        run.wait_for_steps(3)
        for name in (DRIVER_NAME, "hvdtrain-agent", "hvdtrain-guard"):
            assert _children(run, name)
        every = psutil.Process(run.job.pid).children(recursive=True)
        psutil.Process(run.job.pid).kill()
        gone, alive = psutil.wait_procs(every, timeout=10)
        assert gone and not alive
    finally:
        run.job.kill()


@pytest.mark.soak
@pytest.mark.slow
def test_second_start_joins_the_run_only_with_the_same_command(local_run: LocalRun) -> None:
    local_run.wait_for_steps(1)
    same, other = local_run.launch("same"), local_run.launch("other", "--seed", "2")
    done = other.wait(SECONDS)
    assert done.returncode == 2, done
    assert "another hvdtrain launch supervises this run" in done.stderr
    done = same.wait(SECONDS)
    assert done.returncode == 2, done
    assert "drives this run: this process is the agent of its host" in done.stderr
    assert "already has an agent; start one per host" in done.stderr, "this host has one"
    assert local_run.job.running()
