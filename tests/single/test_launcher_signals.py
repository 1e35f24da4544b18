"""What torchrun and the MPI of this environment do with signals: the table of docs/launch.md."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from hvdtrain.launch import mpi
from tests.support.job import poll
from tests.support.runs import TINY, metrics, start

TASK = ["--task", "tests.support.tasks:SlowWhile", "--train.duration", "9999"]


def _expected(launcher: str, name: str) -> tuple[bool, set[int]]:
    """Whether the ranks save, and the exit codes of the launcher."""
    if launcher.startswith("torchrun"):
        return True, {1} if name == "SIGTERM" else {-getattr(signal, name)}
    if name == "SIGUSR1":
        return True, {75}
    if not mpi.of_launcher().is_open_mpi:
        return name == "SIGTERM", {75} if name == "SIGTERM" else {-signal.SIGUSR2}
    # Open MPI reports the signal that it has sent, if ranks end after it.
    return True, {75} if name == "SIGUSR2" else {75, 128 + signal.SIGTERM, 1}


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
    last = metrics(run)[-1]["step"]
    saved = (run / "checkpoints" / f"step_{last:08}").is_dir()
    assert (saved, done.returncode in codes) == (saves, True), done
