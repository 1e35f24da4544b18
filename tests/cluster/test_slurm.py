"""slurm/train.sbatch under a real Slurm with two nodes: whatever ends a start, no step is lost."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import namespaces, runs
from tests.support import slurm as support
from tests.support.cluster import Cluster
from tests.support.job import poll
from tests.support.slurm import Slurm

STEPS = 80
# The first start would take 56 s and more: the time limit's signal comes 20 to 50 s after it.
PACE = "0.7"
WAIT_SECONDS = 120
OPTIONS = ["--nodes=2", "--ntasks-per-node=2"]
TRAIN = [
    *("--task", "tests.support.tasks:SlowFirstStart", *runs.TINY, "--train.steps", str(STEPS)),
    *("--checkpoint.every", "1000"),  # the only checkpoint to resume from is the signal's
]


@dataclass
class SlurmRun:
    """A job of slurm/train.sbatch, and what it writes."""

    slurm: Slurm
    root: Path
    job: int

    @property
    def folder(self) -> Path:
        return self.root / f"slurm-{self.job}"

    @property
    def log(self) -> str:
        return (self.root / "job.log").read_text()

    def wait_for_steps(self) -> None:
        metrics = self.folder / "metrics.jsonl"
        poll(
            lambda: metrics.exists() and metrics.read_text().count("\n") > 2,
            WAIT_SECONDS,
            "the first steps",
        )

    def wait(self, state: str) -> None:
        try:
            self.slurm.wait(self.job, state, WAIT_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.log}") from None


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    reason = namespaces.why_not() or support.why_not()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"the Slurm tests must run in CI: {reason}")
    if reason:
        pytest.skip(reason)
    # Hosts of its own: Slurm's daemons end with them.
    with Cluster(["node1", "node2"]) as cluster:
        yield Slurm(cluster)


@pytest.fixture(autouse=True)
def no_job_left(slurm: Slurm) -> Iterator[None]:
    """One test's job does not keep the nodes from the next."""
    yield
    slurm.run("scancel", "--full", "--signal=KILL", "--user=root")
    poll(lambda: not slurm.run("squeue", "--noheader").stdout, WAIT_SECONDS, "an empty queue")


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm) -> SlurmRun:
    """A job that nothing happened to, by mpirun."""
    run = _submit(slurm, "undisturbed", LAUNCHER="mpirun", HVDTRAIN_TEST_PACE="0")
    run.wait("COMPLETED")
    return run


def _submit(
    slurm: Slurm,
    name: str,
    options: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
    **env: str,
) -> SlurmRun:
    """Options are sbatch's; `more` are flags of hvdtrain.train."""
    root = slurm.cluster.shared / name
    root.mkdir()
    argv = [*OPTIONS, *options, f"--output={root}/job.log", "slurm/train.sbatch", *TRAIN, *more]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HVDTRAIN_TEST_PACE": PACE}
    environment |= {"VENV": sys.prefix, **env}
    return SlurmRun(slurm, root, slurm.sbatch([*argv, "--run.root", str(root)], environment))


def _check_nothing_lost(run: SlurmRun, undisturbed: SlurmRun) -> None:
    """The job ends, and its second start resumed exactly where the first one stopped."""
    _check_end(run, undisturbed)
    stopped = re.findall(r"asked to stop after step (\d+)", run.log)
    resumed = re.findall(r"resumed from the checkpoint of step (\d+)", run.log)
    assert len(stopped) == 1 and stopped == resumed, run.log


def _check_end(run: SlurmRun, undisturbed: SlurmRun) -> None:
    """The job ends in its second start, and its curve does not tell."""
    run.wait("COMPLETED")
    assert run.slurm.field(run.job, "Restarts") == "1"
    assert [line["step"] for line in runs.metrics(run.folder)] == list(range(1, STEPS + 1))
    assert runs.losses(run.folder) == pytest.approx(runs.losses(undisturbed.folder), rel=1e-4)


def test_job_trains_every_step_once_on_both_nodes(undisturbed: SlurmRun) -> None:
    lines = runs.metrics(undisturbed.folder)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert {line["world_size"] for line in lines} == {4}
    assert "4 ranks (node1:2, node2:2)" in undisturbed.log
    assert undisturbed.slurm.field(undisturbed.job, "Restarts") == "0"


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_signal_to_the_job_saves_requeues_and_resumes(
    slurm: Slurm, undisturbed: SlurmRun, launcher: str
) -> None:
    run = _submit(slurm, f"signal-{launcher}", LAUNCHER=launcher)
    run.wait_for_steps()
    slurm.run("scancel", "--batch", "--signal=USR1", str(run.job))
    _check_nothing_lost(run, undisturbed)


def test_killed_rank_ends_a_supervised_job(slurm: Slurm, undisturbed: SlurmRun) -> None:
    run = _submit(slurm, "launch", more=("--checkpoint.every", "5"), LAUNCHER="launch")
    run.wait_for_steps()
    slurm.cluster.kill(slurm.cluster.ranks("node2")[:1])
    run.wait("COMPLETED")
    assert slurm.field(run.job, "Restarts") == "0", "the launcher was restarted, not the job"
    assert run.log.count("starting 4 ranks") == 2, run.log
    assert [line["step"] for line in runs.metrics(run.folder)] == list(range(1, STEPS + 1))
    assert runs.losses(run.folder) == pytest.approx(runs.losses(undisturbed.folder), rel=1e-4)


def test_killed_rank_ends_a_job_that_nobody_supervises(slurm: Slurm) -> None:
    run = _submit(slurm, "killed", LAUNCHER="srun")
    run.wait_for_steps()
    slurm.cluster.kill(slurm.cluster.ranks("node2")[:1])
    run.wait("FAILED")
    assert slurm.field(run.job, "Restarts") == "0"


def test_job_that_is_told_while_it_starts_comes_back(slurm: Slurm, undisturbed: SlurmRun) -> None:
    run = _submit(slurm, "starting")
    poll(lambda: bool(slurm.cluster.ranks()), WAIT_SECONDS, "the first rank")
    slurm.run("scancel", "--batch", "--signal=USR1", str(run.job))
    _check_end(run, undisturbed)


def test_time_limit_saves_requeues_and_resumes(slurm: Slurm, undisturbed: SlurmRun) -> None:
    # Slurm looks every 30 s, and signals what would be due before it looks again.
    run = _submit(slurm, "limit", ("--time=2", "--signal=B:USR1@70"))
    run.wait("RUNNING")
    run.wait("PENDING")
    # On a busy machine the second start might meet its own.
    slurm.run("scontrol", "update", f"JobId={run.job}", "TimeLimit=60")
    _check_nothing_lost(run, undisturbed)


def test_scontrol_requeue_saves_and_resumes(slurm: Slurm, undisturbed: SlurmRun) -> None:
    run = _submit(slurm, "requeue")
    run.wait_for_steps()
    slurm.run("scontrol", "requeue", str(run.job))
    _check_nothing_lost(run, undisturbed)


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_preempted_job_comes_back_after_the_other(
    slurm: Slurm, undisturbed: SlurmRun, launcher: str
) -> None:
    run = _submit(slurm, f"preempted-{launcher}", LAUNCHER=launcher)
    run.wait_for_steps()
    other = slurm.sbatch([*OPTIONS, "--partition=high", "--output=/dev/null", "--wrap", "true"])
    slurm.wait(other, "COMPLETED", WAIT_SECONDS)
    # Under mpirun the ranks may get no time to save.
    (_check_nothing_lost if launcher == "srun" else _check_end)(run, undisturbed)


def test_job_is_not_requeued_beyond_the_cap(slurm: Slurm) -> None:
    run = _submit(slurm, "cap", MAX_RESTARTS="0")
    run.wait_for_steps()
    slurm.run("scancel", "--batch", "--signal=USR1", str(run.job))
    run.wait("FAILED")
    assert slurm.field(run.job, "ExitCode") == "75:0"
    assert f"--run.id slurm-{run.job}" in run.log


def test_cancelled_job_does_not_come_back(slurm: Slurm) -> None:
    run = _submit(slurm, "cancelled")
    run.wait_for_steps()
    slurm.run("scancel", str(run.job))
    run.wait("CANCELLED")
    assert "asked to stop after step" in run.log
    assert slurm.field(run.job, "Restarts") == "0"


def test_mistake_ends_the_job_with_its_own_exit_code(slurm: Slurm) -> None:
    run = _submit(slurm, "mistake", more=("--seeed", "1"))
    run.wait("FAILED")
    assert slurm.field(run.job, "ExitCode") == "2:0"
    assert slurm.field(run.job, "Restarts") == "0"
