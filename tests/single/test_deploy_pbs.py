"""The script of `hvdtrain deploy pbs` with a real mpirun and a simulated PBS."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from hvdtrain import cli
from tests.support import runs
from tests.support.job import Job, poll

# Stub that prints its arguments.
QSUB = '#!/bin/sh\necho "$@" >> "$PBS_O_WORKDIR/submitted"\n'
# A launcher that saves on request, and reports when.
LAUNCHER = """\
#!/bin/bash
[ "$1" = --version ] && echo 'mpirun (Open MPI) 4.1.4' && exit
trap 'echo told; exit 75' USR1
echo began
sleep 20 &
wait
"""

pytestmark = pytest.mark.slow


Start = Callable[..., Job]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a script as PBS does, with its directory first in PATH; end what a test leaves."""
    jobs: list[Job] = []

    def start(script: Path, **env: str) -> Job:
        jobs.append(_started(script, env))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


def _started(script: Path, env: Mapping[str, str]) -> Job:
    directory = script.parent
    for name, text in {"qsub": QSUB, "nodes": "localhost\nlocalhost\n"}.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    given = {
        "PBS_O_WORKDIR": str(directory),
        "PBS_NODEFILE": f"{directory}/nodes",
        "VENV": sys.prefix,
    }
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = f"{directory}:{os.environ['PATH']}"
    given |= {"PBS_JOBID": "7.server", "PATH": path, **root, **env}
    number = len(list(directory.glob("job-*.stdout")))
    return Job([], ["bash", str(script)], runs.environment(given), directory / f"job-{number}")


def written(directory: Path, *keys: str) -> Path:
    out = directory / "train.pbs"
    options = ["--nodes", "1", "--ranks", "2", "--grace", "60", f"--out={out}"]
    assert cli.main(["deploy", "pbs", *options, "--", *keys]) == 0
    return out


def test_signaled_job_saves_a_checkpoint_and_is_resubmitted(tmp_path: Path, start: Start) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    keys = ["--task", "tests.support.tasks:SlowWhile", *runs.TINY, "--run.root", str(tmp_path)]
    script = written(tmp_path, *keys, "--checkpoint.every", "1000")
    env = {"HVDTRAIN_TEST_SLOW": f"0.1:{slow}"}
    run = tmp_path / "pbs-7"
    job = start(script, **env)
    poll(lambda: (run / "metrics.jsonl").exists() and len(runs.metrics(run)) > 1, 120, "steps")
    job.send(signal.SIGUSR1)
    stopped = job.wait(120)
    assert stopped.returncode == 75, stopped
    submitted = (tmp_path / "submitted").read_text()
    assert submitted == f"-v HVDTRAIN_RUN=pbs-7,HVDTRAIN_RESTARTS=1 {script}\n"
    last = runs.metrics(run)[-1]
    assert last["world_size"] == 2
    assert (run / f"checkpoints/step_{last['step']:08}").is_dir(), "steps would be done again"


@pytest.fixture
def job(tmp_path: Path, start: Start) -> Job:
    """Run a job whose launcher saves as soon as it is asked to, a second after its start."""
    (tmp_path / "mpirun").write_text(LAUNCHER)
    (tmp_path / "mpirun").chmod(0o755)
    script = written(tmp_path)
    text = script.read_text()
    assert "\nLIMIT_SECONDS=3600 " in text and "\nGRACE_SECONDS=60 " in text
    script.write_text(text.replace("\nLIMIT_SECONDS=3600 ", "\nLIMIT_SECONDS=63 "))
    return start(script)


def test_ranks_are_signaled_before_the_time_limit(job: Job, tmp_path: Path) -> None:
    done = job.wait(60)
    assert done.returncode == 75 and done.seconds > 2.5, done
    assert done.stdout.startswith("began\ntold\n") and "submitted again" in done.stdout
    assert (tmp_path / "submitted").exists()


def test_deleted_job_is_not_resubmitted(job: Job, tmp_path: Path) -> None:
    job.wait_for("began", 60)
    job.send(signal.SIGTERM)
    done = job.wait(60)
    assert done.returncode == 128 + signal.SIGTERM, done
    assert not (tmp_path / "submitted").exists()
