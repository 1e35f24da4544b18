"""Forked ranks of the tests behave like processes that were started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import warm
from tests.support.job import Job, poll
from tests.support.runs import environment

pytestmark = pytest.mark.slow

WAITING = "rank: "


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    command = [warm.python(1), "-m", "tests.support.waiting", "a flag", "-5"]
    job = Job([], command, environment({"HVDTRAIN_TEST_WORD": "given"}), tmp_path / "job")
    yield job
    job.kill()


def _rank(job: Job) -> psutil.Process:
    job.wait_for(WAITING, 60)
    return psutil.Process(int(job.output().rpartition(WAITING)[2]))


def test_forked_rank_keeps_flags_environment_and_exit_code(job: Job) -> None:
    _rank(job)
    os.kill(job.pid, signal.SIGUSR1)
    done = job.wait(30)
    assert done.returncode == 7
    assert done.stdout.splitlines()[0] == f"['a flag', '-5'] given {os.getcwd()}"


def test_forked_rank_shows_its_command_line_and_environment(job: Job) -> None:
    rank = _rank(job)
    words = ["python", "-m", "tests.support.waiting", "a flag", "-5"]
    assert [word for word in rank.cmdline() if word] == words
    assert rank.environ() == psutil.Process(job.pid).environ()


def test_exit_code_reports_the_signal_that_killed_the_rank(job: Job) -> None:
    _rank(job).kill()
    assert job.wait(30).returncode == -signal.SIGKILL


def test_killed_job_ends_its_forked_rank(job: Job) -> None:
    rank = _rank(job)
    os.kill(job.pid, signal.SIGKILL)
    assert job.wait(30).returncode == -signal.SIGKILL
    poll(lambda: not rank.is_running(), 30, "the end of the rank")


def test_forked_rank_keeps_the_connection_to_the_launcher_of_mpich(tmp_path: Path) -> None:
    script = tmp_path / "abort.py"
    script.write_text("from hvdtrain.runtime import pmi\npmi.abort_job(3)\n")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            [warm.python(1), str(script)],
            env=environment({"PMI_FD": str(theirs.fileno())}),
            pass_fds=[theirs.fileno()],
            timeout=60,
        )
        assert done.returncode == 0
        assert ours.recv(99, socket.MSG_DONTWAIT) == b"cmd=abort exitcode=3\n"
