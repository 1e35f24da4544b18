"""slurm/train.sbatch under a real Slurm with two nodes: no step is lost, however the job ends."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from hvdtrain import cli
from tests.support import namespaces, runs
from tests.support import slurm as support
from tests.support.cluster import Cluster, Process
from tests.support.job import poll
from tests.support.slurm import Slurm

STEPS = 300
# Seconds per micro-batch, of which a rank has two per step: a start would take a minute, and the
# time limit's signal comes 20 to 50 s after it.
PACE = 0.3
WAIT_SECONDS = 120
ONE_EACH = ["--nodes=2", "--ntasks-per-node=1"]
TWO_EACH = ["--nodes=2", "--ntasks-per-node=2"]
TRAIN = [
    *("--task", "tests.support.tasks:SlowWhile", *runs.TINY, "--train.duration", str(STEPS)),
    *("--checkpoint.every", "1000"),  # the only checkpoint to resume from is the signal's
]


@dataclass
class SlurmRun:
    """A job of slurm/train.sbatch, and its output."""

    slurm: Slurm
    root: Path
    job: int
    launcher: str

    @property
    def directory(self) -> Path:
        return self.root / f"slurm-{self.job}"

    @property
    def log(self) -> str:
        return (self.root / "job.log").read_text()

    @property
    def restarts(self) -> int:
        return int(self.slurm.field(self.job, "Restarts"))

    def ranks(self, host: str | None = None) -> list[Process]:
        every = self.slurm.cluster.ranks(host)
        return [process for process in every if str(self.root) in process.command.split()]

    def lines(self) -> list[dict[str, float]]:
        written = (self.directory / "metrics.jsonl").exists()
        return runs.metrics(self.directory) if written else []

    def wait_for_steps(self, since: float = 0.0) -> None:
        """Wait for two steps that ended after a unix time."""

        def trains() -> bool:
            return sum(line["time"] > since for line in self.lines()) > 1

        try:
            poll(trains, WAIT_SECONDS, "two steps")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.describe()}") from None

    def wait(self, state: str) -> None:
        try:
            self.slurm.wait(self.job, state, WAIT_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.describe()}") from None

    def describe(self) -> str:
        """The end of its log, the queue, and where each thread of its ranks is in the kernel."""
        parts = [self.log[-2000:], self.slurm.run("squeue").stdout]
        for rank in self.ranks():
            parts.append(f"{rank.host}: {rank.command[:60]}")
            for thread in Path(f"/proc/{rank.pid}/task").iterdir():
                names = ("comm", "wchan", "syscall")
                parts.append(" ".join((thread / name).read_text().strip() for name in names))
        return "\n".join(parts)

    def restarted_by(self, disturb: Callable[[], object]) -> str:
        """Call it, and wait until the job trains again; return the part of its log."""
        self.wait_for_steps()
        before, number = len(self.log), self.restarts + 1
        disturb()
        self.wait_for_restart(number)
        return self.log[before:]

    def wait_for_restart(self, number: int) -> None:
        """Wait until it was started this many times in total, and trains."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.restarts < number:
            assert time.monotonic() < deadline, self.describe()
            time.sleep(0.5)  # not `poll`: each query starts a process
        self.wait("RUNNING")
        self.wait_for_steps(time.time())

    def finish_after_its_time_limit(self) -> None:
        """Wait until it is requeued because of its time limit, and finish without one."""
        self.wait("RUNNING")
        self.wait("PENDING")
        # On a busy machine the second start might overlap with its own first one.
        self.slurm.run("scontrol", "update", f"JobId={self.job}", "TimeLimit=60")
        self.finish()

    def finish(self) -> None:
        """Make the remaining steps take no time; the job must exit with 0."""
        (self.root / "slow").unlink()
        self.wait("COMPLETED")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    reason = namespaces.why_not() or support.why_not()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"the Slurm tests must run in CI: {reason}")
    if reason:
        pytest.skip(reason)
    # Separate hosts: Slurm's daemons end with them.
    with Cluster(["node1", "node2"]) as cluster:
        yield Slurm(cluster)


class Submit(Protocol):
    """Submit slurm/train.sbatch in a directory of that name.

    `options` are sbatch's, `more` are flags of hvdtrain.train, `env` is added to the environment;
    `script` replaces the repository's script, with `TRAIN` in it.
    """

    def __call__(
        self,
        name: str,
        options: Sequence[str] = ...,
        more: Sequence[str] = ...,
        script: Path | None = ...,
        **env: str,
    ) -> SlurmRun: ...


@pytest.fixture(scope="module")
def venv(slurm: Slurm) -> Path:
    """A directory to activate, after which `python -m hvdtrain.train` is forked, see warm.py."""
    directory = slurm.cluster.shared / "venv"
    (directory / "bin").mkdir(parents=True)
    python = directory / "bin" / "python"
    forked = f'[ "$2" = hvdtrain.train ] && exec {slurm.cluster.python} "$@"'
    python.write_text(f'#!/bin/sh\n{forked}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    activate = f"source {sys.prefix}/bin/activate\nPATH={directory}/bin:$PATH\n"
    (directory / "bin" / "activate").write_text(activate)
    return directory


@pytest.fixture(scope="module")
def submit(slurm: Slurm, venv: Path) -> Submit:
    def submit(
        name: str,
        options: Sequence[str] = ONE_EACH,
        more: Sequence[str] = (),
        script: Path | None = None,
        **env: str,
    ) -> SlurmRun:
        root = slurm.cluster.shared / name
        root.mkdir()
        slow = root / "slow"
        slow.touch()
        train = [str(script)] if script else ["slurm/train.sbatch", *TRAIN]
        argv = [*options, f"--output={root}/job.log", *train, *more]
        environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "VENV": str(venv)}
        environment |= {"HVDTRAIN_TEST_SLOW": f"{PACE}:{slow}", **env}
        job = slurm.sbatch([*argv, "--run.root", str(root)], environment)
        return SlurmRun(slurm, root, job, env.get("LAUNCHER", "srun"))

    return submit


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm, submit: Submit) -> SlurmRun:
    """An undisturbed job of `hvdtrain deploy slurm`, with mpirun."""
    script = slurm.cluster.shared / "deployed.sbatch"
    size = ["--nodes", "2", "--ranks", "2", "--time", "00:30:00", "--name", "undisturbed"]
    assert cli.main(["deploy", "slurm", *size, f"--out={script}", "--", *TRAIN]) == 0
    run = submit("undisturbed", (), script=script, LAUNCHER="mpirun")
    run.finish()
    return run


@pytest.fixture(scope="module", params=["srun", pytest.param("mpirun", marks=pytest.mark.soak)])
def one_job(
    request: pytest.FixtureRequest, slurm: Slurm, submit: Submit, undisturbed: SlurmRun
) -> Iterator[SlurmRun]:
    """A job under each launcher for the tests below, one after another."""
    yield submit(f"one-{request.param}", LAUNCHER=request.param)
    _clear(slurm)


@pytest.fixture(autouse=True)
def no_job_left(request: pytest.FixtureRequest, slurm: Slurm) -> Iterator[None]:
    """Prevent a test's job from keeping the nodes from the next test."""
    yield
    if "one_job" not in request.fixturenames:
        _clear(slurm)


def _clear(slurm: Slurm) -> None:
    slurm.run("scancel", "--full", "--signal=KILL", "--user=root")
    poll(lambda: not slurm.run("squeue", "--noheader").stdout, WAIT_SECONDS, "an empty queue")


def _check_nothing_lost(run: SlurmRun, log: str, undisturbed: SlurmRun) -> None:
    """Check that its newest start resumed exactly where the previous one stopped."""
    stopped = re.findall(r"asked to stop after step (\d+)", log)
    resumed = re.findall(r"resumed from the checkpoint of step (\d+)", log)
    assert len(stopped) == 1 and stopped == resumed, run.log
    _check_curve(run, undisturbed)


def _check_curve(run: SlurmRun, undisturbed: SlurmRun) -> None:
    """Check that each step so far was done once, with the losses of the undisturbed job."""
    lines = run.lines()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    expected = runs.losses(undisturbed.directory)[: len(lines)]
    assert [line["loss"] for line in lines] == pytest.approx(expected, rel=1e-4)


def test_job_trains_every_step_once_on_both_nodes(undisturbed: SlurmRun) -> None:
    lines = undisturbed.lines()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert {line["world_size"] for line in lines} == {4}
    assert "4 ranks (node1:2, node2:2)" in undisturbed.log
    assert undisturbed.restarts == 0


only_srun = pytest.mark.parametrize("one_job", ["srun"], indirect=True)


@pytest.mark.soak
@only_srun
def test_signal_during_start_up_requeues_the_job(
    slurm: Slurm, one_job: SlurmRun, undisturbed: SlurmRun
) -> None:
    poll(lambda: bool(one_job.ranks()), WAIT_SECONDS, "the first rank")
    slurm.run("scancel", "--batch", "--signal=USR1", str(one_job.job))
    one_job.wait_for_restart(1)
    _check_curve(one_job, undisturbed)


def test_signal_to_the_job_saves_requeues_and_resumes(
    slurm: Slurm, one_job: SlurmRun, undisturbed: SlurmRun
) -> None:
    signal = ["scancel", "--batch", "--signal=USR1", str(one_job.job)]
    log = one_job.restarted_by(lambda: slurm.run(*signal))
    _check_nothing_lost(one_job, log, undisturbed)


@only_srun
def test_srun_gets_the_variable_with_which_mpi_init_waits_for_all_nodes(one_job: SlurmRun) -> None:
    """Without it, one in some hundred starts ends in a segmentation fault."""
    one_job.wait_for_steps()
    found = [Path(f"/proc/{rank.pid}/environ").read_bytes() for rank in one_job.ranks()]
    assert found and all(b"\0SLURM_PMIX_FENCE=ring\0" in environment for environment in found)


@only_srun
def test_scontrol_requeue_saves_and_resumes(
    slurm: Slurm, one_job: SlurmRun, undisturbed: SlurmRun
) -> None:
    log = one_job.restarted_by(lambda: slurm.run("scontrol", "requeue", str(one_job.job)))
    _check_nothing_lost(one_job, log, undisturbed)


def test_preempted_job_resumes_after_the_other_job(
    slurm: Slurm, one_job: SlurmRun, undisturbed: SlurmRun
) -> None:
    def make_room() -> None:
        wants_all = [*TWO_EACH, "--partition=high", "--output=/dev/null", "--wrap", "true"]
        slurm.wait(slurm.sbatch(wants_all), "COMPLETED", WAIT_SECONDS)

    log = one_job.restarted_by(make_room)
    # Under mpirun the ranks may get no time to save.
    if one_job.launcher == "srun":
        _check_nothing_lost(one_job, log, undisturbed)
    _check_curve(one_job, undisturbed)


def test_requeued_job_runs_to_its_last_step(one_job: SlurmRun, undisturbed: SlurmRun) -> None:
    one_job.finish()
    assert len(one_job.lines()) == STEPS
    _check_curve(one_job, undisturbed)


@pytest.mark.soak
def test_job_of_an_own_loop_is_requeued_before_its_time_limit(slurm: Slurm, venv: Path) -> None:
    page = (runs.REPOSITORY / "docs/own-loops.md").read_text()
    script = page.partition("```bash\n")[2].partition("```")[0]
    loop = page.partition("```python\n")[2].partition("```")[0]
    root = slurm.cluster.shared / "own"
    root.mkdir()
    slow = root / "slow"
    slow.touch()
    line = "    for step in training:\n"
    wait = f"        if os.path.exists({str(slow)!r}):\n            time.sleep(1)\n"
    assert loop.count(line) == 1
    loop = "import os, time\n" + loop.replace(line, line + wait)
    (root / "loop.py").write_text(loop)
    assert ". .venv/bin/activate" in script
    script = script.replace(". .venv/bin/activate", f"cd {root}; . {venv}/bin/activate")
    (root / "loop.sbatch").write_text(script)
    limit = ["--time=1", f"--output={root}/job.log", str(root / "loop.sbatch")]
    env = {"PYTHONPATH": str(runs.REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    job = slurm.sbatch(limit, env)
    run = SlurmRun(slurm, root, job, "launch")
    run.finish_after_its_time_limit()
    (stopped,) = re.findall(r"asked to stop after step (\d+)", run.log)
    assert re.findall(r"resumed from the checkpoint of step (\d+)", run.log) == [stopped]


@pytest.mark.soak
def test_job_without_a_signal_saves_before_its_time_limit(
    slurm: Slurm, submit: Submit, undisturbed: SlurmRun
) -> None:
    run = submit("ended", [*ONE_EACH, "--time=1", "--signal=B:CONT@1"])
    run.finish_after_its_time_limit()
    assert run.restarts == 1 and "the scheduler's time limit is" in run.log
    _check_nothing_lost(run, run.log, undisturbed)


@pytest.mark.soak
def test_time_limit_saves_requeues_and_resumes(
    slurm: Slurm, submit: Submit, undisturbed: SlurmRun
) -> None:
    # Slurm checks every 30 s, and signals what would be due before the next check.
    run = submit("limited", [*ONE_EACH, "--time=2", "--signal=B:USR1@70"])
    run.finish_after_its_time_limit()
    assert run.restarts == 1
    _check_nothing_lost(run, run.log, undisturbed)


def test_killed_rank_fails_an_unsupervised_job(submit: Submit) -> None:
    run = submit("killed", LAUNCHER="srun")
    run.wait_for_steps()
    run.slurm.cluster.kill(run.ranks("node2"))
    run.wait("FAILED")
    assert run.restarts == 0


@pytest.mark.soak
def test_supervised_job_continues_after_rank_is_killed(
    submit: Submit, undisturbed: SlurmRun
) -> None:
    run = submit("launch", more=("--checkpoint.every", "5"), LAUNCHER="launch")
    run.wait_for_steps()
    run.slurm.cluster.kill(run.ranks("node2"))
    poll(lambda: run.log.count("starting 2 ranks") == 2, WAIT_SECONDS, "the second start")
    run.finish()
    assert run.restarts == 0, "the launcher was restarted, not the job"
    assert len(run.lines()) == STEPS
    _check_curve(run, undisturbed)


@pytest.mark.soak
def test_signal_to_all_processes_of_a_supervised_job_saves(
    slurm: Slurm, submit: Submit, undisturbed: SlurmRun
) -> None:
    run = submit("all", LAUNCHER="launch")
    signal = ["scancel", "--full", "--signal=USR1", str(run.job)]
    log = run.restarted_by(lambda: slurm.run(*signal))
    _check_nothing_lost(run, log, undisturbed)
    slurm.run("scancel", str(run.job))
    run.wait("CANCELLED")
    last = run.lines()[-1]["step"]
    lost = f"before they had saved step {last}" in run.log
    saved = (run.directory / f"checkpoints/step_{last:08}").exists()
    assert lost or saved, run.log


# Options of sbatch that leave Slurm to choose the tasks of each node.
TASKS = [
    "--nodes=2 --ntasks=3 --ntasks-per-node=2",
    "--nodes=2 --ntasks=2 --ntasks-per-node=2",
    "--nodes=2 --ntasks-per-node=2",
    "--nodes=2 --ntasks=4",
    "--nodes=1 --ntasks=2",
    "--nodes=2 --ntasks=3",
]


@pytest.mark.parametrize("options", TASKS)
def test_slurm_hosts_match_where_srun_starts_tasks(slurm: Slurm, options: str) -> None:
    show = (
        "from hvdtrain.launch.hostfile import as_text, slurm_hosts; print(as_text(slurm_hosts()))"
    )
    script = f"{sys.executable} -c '{show}'; srun sh -c 'echo task $SLURMD_NODENAME'"
    log = slurm.cluster.shared / f"tasks-{TASKS.index(options)}.log"
    job = slurm.sbatch([*options.split(), f"--output={log}", "--wrap", script])
    slurm.wait(job, "COMPLETED", WAIT_SECONDS)
    hosts, *tasks = log.read_text().splitlines()
    found = Counter(line.split()[1] for line in tasks if line.startswith("task "))  # no warnings
    assert hosts == ",".join(f"{name}:{found[name]}" for name in sorted(found)), tasks


@pytest.mark.soak
def test_job_is_not_requeued_beyond_the_cap(slurm: Slurm, submit: Submit) -> None:
    run = submit("cap", MAX_RESTARTS="0")
    run.wait_for_steps()
    slurm.run("scancel", "--batch", "--signal=USR1", str(run.job))
    run.wait("FAILED")
    assert slurm.field(run.job, "ExitCode") == "75:0"
    assert f"--run.id slurm-{run.job}" in run.log


@pytest.mark.soak
def test_sigterm_to_all_processes_of_tasks_with_data_workers_saves(
    slurm: Slurm, submit: Submit, undisturbed: SlurmRun
) -> None:
    # Without warm.py: Slurm does not know the ranks that it forks.
    run = submit("workers", more=["--loader.workers", "1"], VENV=sys.prefix)
    log = run.restarted_by(lambda: slurm.run("scancel", "--signal=TERM", str(run.job)))
    _check_nothing_lost(run, log, undisturbed)


@pytest.mark.soak
def test_cancelled_job_is_not_requeued(slurm: Slurm, submit: Submit) -> None:
    run = submit("cancelled", TWO_EACH)
    run.wait_for_steps()
    slurm.run("scancel", str(run.job))
    run.wait("CANCELLED")
    assert "asked to stop after step" in run.log
    assert run.restarts == 0


def test_invalid_flag_fails_the_job_with_exit_code_2(slurm: Slurm, submit: Submit) -> None:
    run = submit("mistake", more=("--seeed", "1"))
    run.wait("FAILED")
    assert slurm.field(run.job, "ExitCode") == "2:0"
    assert run.restarts == 0


@pytest.mark.soak
def test_srun_without_pmi_starts_no_runs_unless_standalone(slurm: Slurm) -> None:
    train = [sys.executable, "-m", "hvdtrain.train", *runs.TINY, "--train.duration", "2"]
    step = ["srun", "--nodes=2", "--ntasks=2", "--mpi=none"]
    root = slurm.cluster.shared / "srun"
    slurm.run(*step, *train, "--run.root", str(root), code=1)  # Open MPI 4 refuses it itself
    assert not root.exists()
    alone = ["sh", "-c", 'exec "$@" --run.id rank-$SLURM_PROCID', "sh", *train]
    slurm.run(*step, *alone, "--runtime.standalone", "true", "--run.root", str(root))
    assert [len(runs.losses(root / f"rank-{rank}")) for rank in range(2)] == [2, 2]
