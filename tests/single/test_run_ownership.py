"""Run ownership: one process trains a run at a time, and a dead owner blocks no other."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hvdtrain.run_files import ownership
from hvdtrain.run_files.owner_token import Claim
from tests.support.faults import PACED
from tests.support.job import Job, poll
from tests.support.runs import environment, metrics, start

PACE = {"HVDTRAIN_TEST_PACE": "0.02"}
TASK = "--task tests.support.disturbed:NoLocks"


class Runs:
    """Processes that train the same run with the same command."""

    def __init__(self, root: Path) -> None:
        self.root, self.run = root, root / "case"
        self.jobs: list[Job] = []

    def start(self, flags: str = "") -> Job:
        where = f"--run.root {self.root} --run.id case --checkpoint.every 10"
        arguments = f"{PACED} {where} {flags}".split()
        self.jobs.append(start(self.root / "output", arguments, env=environment(PACE)))
        return self.jobs[-1]

    def wait_for_more(self, job: Job, timeout: float = 60) -> None:
        """Wait for ten new steps."""
        path = self.run / "metrics.jsonl"

        def steps() -> int:
            assert job.running(), job.output()
            return path.read_text().count("\n") if path.exists() else 0

        target = steps() + 10
        poll(lambda: steps() >= target, timeout, f"step {target}: {job.output()}")

    def process(self, job: Job) -> psutil.Process:
        return psutil.Process(job.pid)

    def content(self) -> dict[str, bytes]:
        """Files of the run, without unfinished saves, which have directories that no one reads."""
        files = (path for path in self.run.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in files if path.parent.suffix != ".tmp"}


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    runs = Runs(tmp_path)
    yield runs
    for job in runs.jobs:
        job.kill()


@pytest.mark.soak
def test_run_has_one_owner_on_a_file_system_without_locks(runs: Runs) -> None:
    first = runs.start(TASK)
    runs.wait_for_more(first)
    second = runs.start(TASK).wait(60)
    assert second.returncode == 2, second
    assert "another process" in second.stderr and "Traceback" not in second.stderr, second
    # Nor does a lock that other hosts do not see, as on NFS with local_lock.
    locked = runs.start().wait(60)
    assert locked.returncode == 2 and "another process" in locked.stderr, locked
    runs.process(first).kill()
    first.wait(10)
    third = runs.start(TASK)
    runs.wait_for_more(third)
    assert "is taken over" in third.output(), third.output()
    os.kill(runs.process(third).pid, signal.SIGTERM)
    assert third.wait(30).returncode == 75
    assert json.loads((runs.run / ".owner").read_text())["ended"], "the next start would wait"


def test_suspended_owner_exits_without_writing_after_a_takeover(runs: Runs) -> None:
    first = runs.start()
    runs.wait_for_more(first)
    runs.process(first).suspend()
    second = runs.start()
    runs.wait_for_more(second)
    os.kill(runs.process(second).pid, signal.SIGTERM)
    assert second.wait(30).returncode == 75
    third = runs.start()
    runs.wait_for_more(third)
    os.kill(runs.process(third).pid, signal.SIGSTOP)
    content = runs.content()
    runs.process(first).resume()
    done = first.wait(20)
    assert done.returncode == 1, done
    assert "was taken over by process" in done.stderr, done
    assert runs.content() == content
    os.kill(runs.process(third).pid, signal.SIGCONT)
    runs.wait_for_more(third)
    steps = [line["step"] for line in metrics(runs.run)]
    assert steps == list(range(1, len(steps) + 1))


def test_start_after_a_crash_does_not_wait_if_locks_work(runs: Runs) -> None:
    first = runs.start()
    runs.wait_for_more(first)
    runs.process(first).kill()
    first.wait(10)
    assert (runs.run / ".owner").exists()
    began = time.monotonic()
    second = runs.start()
    runs.wait_for_more(second)
    assert "heartbeat arrives" not in second.output(), second.output()
    assert time.monotonic() - began < 12


def test_disk_that_fails_at_a_takeover_does_not_end_ranks_with_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(directory: Path) -> int:
        raise OSError(errno.ESTALE, "stale file handle")

    monkeypatch.setattr(ownership, "_device", stale)
    own = ownership.Ownership(tmp_path / "run")
    own.acquire(Claim.of_this_process(), tolerate_errors=True)
    own.release()
