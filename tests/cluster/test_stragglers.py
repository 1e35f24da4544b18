"""A slow rank is reported while it is slow, with its host and phase."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvdtrain.run_files.events_file import read_lines
from tests.support.cluster import Cluster
from tests.support.job import Job, poll
from tests.support.runs import CORPUS

pytestmark = pytest.mark.alone
NAMED_SECONDS = 60
EVERY = (
    "--train.duration 100000 --eval.every 0 --checkpoint.every 0 --telemetry.exchange_every 5"
    " --telemetry.port 0"
)
SLEEPING = (
    f"--task tests.support.disturbed:Lagging --batch.global_size 8 --batch.micro_size 2 {EVERY}"
)
# Steps long enough to exceed the noise.
COMPUTING = (
    "--model.layers 2 --model.width 128 --model.heads 2 --model.context 128"
    f" --data.train {CORPUS} --batch.global_size 16 --batch.micro_size 4 {EVERY}"
)
MPIRUN = (
    "mpirun -x HVDTRAIN_TEST_LAG -x OMP_NUM_THREADS --bind-to none -np 4 --host node1:2,node2:2"
)
GLOO = "horovodrun --gloo -np 2 -H node1:1,node2:1"
NAMED = r"rank (\d) on (\w+) is slow: .* loses most in: (\w+)"


def _start(cluster: Cluster, runs: Path, launcher: str, train: str, lag: str = "") -> Job:
    train = f"{cluster.python} -m hvdtrain.train {train} --run.root {runs} --run.id case"
    argv = f"{launcher} {train}".split()
    # The hosts share this machine's cores: more threads per rank would compete.
    job = cluster.start("node1", argv, {"HVDTRAIN_TEST_LAG": lag, "OMP_NUM_THREADS": "1"})
    poll(lambda: _exchanges(runs) > 3, 90, "exchanges")
    return job


def _exchanges(runs: Path) -> int:
    file = runs / "case/ranks.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def _end(job: Job, cluster: Cluster) -> None:
    os.kill(cluster.ranks("node1")[0].pid, signal.SIGUSR1)
    done = job.wait(60)
    assert done.returncode == 75, done


def _events(runs: Path, name: str) -> list[tuple[int, str, str]]:
    lines = read_lines(runs / "case/events.jsonl")
    return [(e["rank"], e["host"], e["phase"]) for e in lines if e["event"] == name]


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_rank_with_slow_data_is_named_once(cluster: Cluster, runs: Path) -> None:
    lag = runs / "lag"
    job = _start(cluster, runs, MPIRUN, SLEEPING, f"3:0.05:{lag}")
    assert "is slow" not in job.output()
    lag.touch()
    job.wait_for("is slow", NAMED_SECONDS)
    before = _exchanges(runs)
    poll(lambda: _exchanges(runs) > before + 3, NAMED_SECONDS, "more exchanges")
    lag.unlink()
    job.wait_for("is no longer slow", NAMED_SECONDS)
    _end(job, cluster)
    assert re.findall(NAMED, job.output()) == [("3", "node2", "data")], job.output()
    for event in ("straggler", "straggler_ended"):
        assert _events(runs, event) == [(3, "node2", "data")]


@contextmanager
def _throttled(pid: int) -> Iterator[None]:
    """Throttle a process to 40 ms of each 100, like a cgroup quota."""
    ended = threading.Event()

    def throttle() -> None:
        while not ended.wait(0.04):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.06)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.timeout(300)
def test_rank_with_a_slow_processor_is_named(cluster: Cluster, runs: Path) -> None:
    # MPI waits by polling, which would also use the other rank's processor.
    job = _start(cluster, runs, GLOO, COMPUTING)
    [slow] = cluster.ranks("node2")
    # Other programs may also slow down the other rank, which is then reported.
    with _throttled(slow.pid):
        job.wait_for("rank 1 on node2 is slow", NAMED_SECONDS)
    job.wait_for("rank 1 on node2 is no longer slow", NAMED_SECONDS)
    _end(job, cluster)
    assert ("1", "node2", "compute") in re.findall(NAMED, job.output()), job.output()
    assert (1, "node2", "compute") in _events(runs, "straggler_ended")
