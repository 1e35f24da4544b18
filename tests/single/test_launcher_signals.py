"""What torchrun, srun and this MPI do with signals: the table of docs/launch.md."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from hvdtrain.launch import mpi
from tests.support import namespaces
from tests.support import slurm as support
from tests.support.cluster import REPOSITORY, Cluster
from tests.support.job import poll
from tests.support.runs import TINY, metrics, start
from tests.support.slurm import Slurm

TASK = ["--task", "tests.support.tasks:SlowWhile", "--train.duration", "9999"]


def _expected(launcher: str, name: str) -> tuple[bool | None, set[int]]:
    """Whether the ranks save (None: if they are fast enough), and the launcher's exit codes."""
    if launcher.startswith("torchrun"):
        return True, {1} if name == "SIGTERM" else {-getattr(signal, name)}
    if name == "SIGUSR1":
        return True, {75}
    if not mpi.of_launcher().is_open_mpi:
        return name == "SIGTERM", {75} if name == "SIGTERM" else {-signal.SIGUSR2}
    if name == "SIGUSR2":
        return True, {75}
    # Open MPI kills the ranks after 1.0 s, or 0.25 s since version 5, and reports the signal that
    # it has sent, if they end after it.
    return None, {75, 128 + signal.SIGTERM, 128 + signal.SIGKILL, 1}


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "name"),
    [("mpirun:2", name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2")]
    + [("torchrun:2", name) for name in ("SIGTERM", "SIGUSR1")],
)
def test_signal_to_the_launcher_saves_or_ends_the_ranks(
    tmp_path: Path, launcher: str, name: str
) -> None:
    run = tmp_path / "a"
    where = ["--run.root", str(tmp_path), "--run.id", "a"]
    slow = {"HVDTRAIN_TEST_SLOW": f"0.05:{tmp_path}"}
    job = start(tmp_path, [*TINY, *TASK, *where], launcher, slow)
    try:
        file = run / "metrics.jsonl"
        poll(lambda: file.exists() and len(metrics(run)) >= 2, 60, "step 2")
        started = psutil.Process(job.pid).children(recursive=True)
        psutil.Process(job.pid).send_signal(getattr(signal, name))
        _, alive = psutil.wait_procs(started, 60)
        assert not alive, job.output()
        done = job.wait(30)
    finally:
        job.kill()
    saves, codes = _expected(launcher, name)
    print(f"{launcher} {name}: exit code {done.returncode}")
    assert saves in (None, _saved(run)), done
    assert done.returncode in codes, done


@pytest.mark.smoke
@pytest.mark.slow
def test_srun_kills_at_sigterm_and_passes_user_signals_on() -> None:
    if reason := namespaces.why_not() or support.why_not():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    if not mpi.of_launcher().is_open_mpi or mpi.of_launcher().is_prrte:
        pytest.skip("this MPI was not tried with Slurm's PMIx")
    with Cluster(["node1"], sshd=False) as cluster:
        slurm = Slurm(cluster)
        for name, code in [("SIGTERM", 137), ("SIGUSR1", 75), ("SIGUSR2", 75)]:
            root = cluster.shared / name
            root.mkdir()
            where = ["--run.root", str(root), "--run.id", "a"]
            step = ["srun", "--ntasks=2", "--mpi=pmix", sys.executable, "-m", "hvdtrain.train"]
            env = slurm.env | {"HVDTRAIN_TEST_SLOW": f"0.05:{root}", "PYTHONPATH": str(REPOSITORY)}
            job = cluster.start("node1", [*step, *TINY, *TASK, *where], env)
            poll(lambda run=root / "a": len(metrics(run)) >= 2, 60, "step 2")
            srun, *_ = [p for p in cluster.processes() if p.command.startswith("srun ")]
            os.kill(srun.pid, getattr(signal, name))
            done = job.wait(60)
            assert (_saved(root / "a"), done.returncode) == (code == 75, code), done
            poll(lambda: not cluster.ranks(), 20, "the end of the ranks")


def _saved(run: Path) -> bool:
    last = metrics(run)[-1]["step"]
    return (run / "checkpoints" / f"step_{last:08}").is_dir()
