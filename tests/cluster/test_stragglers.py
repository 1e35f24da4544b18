"""A rank that is slow is named while it is slow: its host, and in which phase."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvdtrain.run_files.events_file import read_lines
from tests.support.cluster import Cluster
from tests.support.job import Job, poll
from tests.support.runs import CORPUS

NAMED_SECONDS = 60
EVERY = (
    "--train.steps 100000 --eval.every 0 --checkpoint.every 0 --telemetry.exchange_every 5"
    " --telemetry.port 0"
)
SLEEPING = (
    f"--task tests.support.lagging:Lagging --batch.global_size 8 --batch.micro_size 2 {EVERY}"
)
# Steps long enough to be told from noise.
COMPUTING = (
    "--model.layers 2 --model.width 128 --model.heads 2 --model.context 128"
    f" --data.train {CORPUS} --batch.global_size 16 --batch.micro_size 4 {EVERY}"
)
NAMED = r"rank (\d) on (\w+) is slow: .* loses most in: (\w+)"


def _start(cluster: Cluster, runs: Path, np: int, hosts: str, train: str, lag: str = "") -> Job:
    argv = ["mpirun", "-x", "HVDTRAIN_TEST_LAG", "-x", "OMP_NUM_THREADS", "--bind-to", "none"]
    argv += f"-np {np} --host {hosts}".split()
    argv += f"python -m hvdtrain.train {train} --run.root {runs} --run.id case".split()
    # The hosts share this machine's cores: the threads of a rank would wait for each other.
    job = cluster.start("node1", argv, {"HVDTRAIN_TEST_LAG": lag, "OMP_NUM_THREADS": "1"})
    poll(lambda: _exchanges(runs) > 3, 90, "exchanges")
    return job


def _exchanges(runs: Path) -> int:
    file = runs / "case/ranks.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def _end(job: Job, cluster: Cluster) -> None:
    launcher = next(p for p in cluster.processes("node1") if p.command.startswith("mpirun"))
    os.kill(launcher.pid, signal.SIGUSR1)
    done = job.wait(60)
    assert done.returncode == 75, done


def _events(runs: Path, name: str) -> list[tuple[int, str, str]]:
    lines = read_lines(runs / "case/events.jsonl")
    return [(e["rank"], e["host"], e["phase"]) for e in lines if e["event"] == name]


@pytest.mark.timeout(300)
def test_a_rank_whose_data_are_slow_is_not_named_or_again_and_again(
    cluster: Cluster, runs: Path
) -> None:
    lag = runs / "lag"
    job = _start(cluster, runs, 4, "node1:2,node2:2", SLEEPING, f"3:0.05:{lag}")
    assert "is slow" not in job.output()
    lag.touch()
    job.wait_for("is slow", NAMED_SECONDS)
    before = _exchanges(runs)
    poll(lambda: _exchanges(runs) > before + 3, NAMED_SECONDS, "more exchanges")
    lag.unlink()
    job.wait_for("is not slow any more", NAMED_SECONDS)
    _end(job, cluster)
    assert re.findall(NAMED, job.output()) == [("3", "node2", "data")], job.output()
    for event in ("straggler", "straggler_ended"):
        assert _events(runs, event) == [(3, "node2", "data")]


@contextmanager
def _busy(core: int, programs: int) -> Iterator[None]:
    """Programs that use a core as much as they are let."""
    command = ["taskset", "--cpu-list", str(core), "sh", "-c", "while :; do :; done"]
    processes = [subprocess.Popen(command) for _ in range(programs)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


def _pin(pids: Sequence[int], core: int) -> None:
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), {core})


@pytest.mark.timeout(300)
def test_a_rank_whose_processor_is_slow_is_not_named(cluster: Cluster, runs: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("two ranks need two cores to differ")
    job = _start(cluster, runs, 2, "node1:1,node2:1", COMPUTING)
    for host, core in zip(("node1", "node2"), cores, strict=False):
        _pin([rank.pid for rank in cluster.ranks(host)], core)
    # Others on the machine may slow the other rank down too, and it is named then.
    with _busy(cores[1], 1):  # half of the core is left for the rank
        job.wait_for("rank 1 on node2 is slow", NAMED_SECONDS)
    job.wait_for("rank 1 on node2 is not slow any more", NAMED_SECONDS)
    _end(job, cluster)
    assert ("1", "node2", "compute") in re.findall(NAMED, job.output()), job.output()
    assert (1, "node2", "compute") in _events(runs, "straggler_ended")
