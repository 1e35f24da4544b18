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

from hvdtrain.telemetry.events_file import read_lines
from tests.support.cluster import Cluster
from tests.support.job import Job, poll
from tests.support.runs import CORPUS

NAMED_SECONDS = 60
# Steps long enough to be told from noise, and an exchange after each few.
TRAIN = (
    "--task tests.support.lagging:Lagging --model.layers 2 --model.width 128 --model.heads 2"
    f" --model.context 128 --data.train {CORPUS} --batch.global_size 16 --batch.micro_size 4"
    " --train.steps 100000 --eval.every 0 --checkpoint.every 0 --telemetry.exchange_every 5"
    " --telemetry.port 0"
)
NAMED = r"rank (\d) on (\w+) is slow: .* loses most in: (\w+)"


def _start(cluster: Cluster, runs: Path, np: int, hosts: str, lag: str = "9:0:x") -> Job:
    argv = f"mpirun -x HVDTRAIN_TEST_LAG --bind-to none -np {np} --host {hosts}".split()
    argv += f"python -m hvdtrain.train {TRAIN} --run.root {runs} --run.id case".split()
    job = cluster.start("node1", argv, {"HVDTRAIN_TEST_LAG": lag})
    exchanges = runs / "case/ranks.jsonl"
    poll(lambda: exchanges.exists() and exchanges.read_text().count("\n") > 3, 90, "exchanges")
    return job


def _end(job: Job, cluster: Cluster) -> None:
    launcher = next(p for p in cluster.processes("node1") if p.command.startswith("mpirun"))
    os.kill(launcher.pid, signal.SIGUSR1)
    done = job.wait(60)
    assert done.returncode == 75, done


def _events(runs: Path, *names: str) -> list[tuple[int, str, str]]:
    lines = read_lines(runs / "case/events.jsonl")
    return [(e["rank"], e["host"], e["phase"]) for e in lines if e["event"] in names]


def _check_named_once(job: Job, runs: Path, expected: tuple[int, str, str]) -> None:
    named = re.findall(NAMED, job.output())
    assert [(int(rank), host, phase) for rank, host, phase in named] == [expected], job.output()
    assert _events(runs, "straggler") == [expected]
    assert _events(runs, "straggler_ended") == [expected]


@pytest.mark.timeout(300)
def test_a_rank_whose_data_are_slow_is_not_named_or_again_and_again(
    cluster: Cluster, runs: Path
) -> None:
    lag = runs / "lag"
    job = _start(cluster, runs, 4, "node1:2,node2:2", f"3:0.05:{lag}")
    assert "is slow" not in job.output()
    lag.touch()
    job.wait_for("is slow", NAMED_SECONDS)
    before = len((runs / "case/ranks.jsonl").read_text().splitlines())
    poll(
        lambda: len((runs / "case/ranks.jsonl").read_text().splitlines()) > before + 3,
        NAMED_SECONDS,
        "more exchanges",
    )
    lag.unlink()
    job.wait_for("is not slow any more", NAMED_SECONDS)
    _end(job, cluster)
    _check_named_once(job, runs, (3, "node2", "data"))


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
    job = _start(cluster, runs, 2, "node1:1,node2:1")
    for host, core in zip(("node1", "node2"), cores, strict=False):
        _pin([rank.pid for rank in cluster.ranks(host)], core)
    with _busy(cores[1], 2):  # a third of the core is left for the rank
        job.wait_for("is slow", NAMED_SECONDS)
    job.wait_for("is not slow any more", NAMED_SECONDS)
    _end(job, cluster)
    _check_named_once(job, runs, (1, "node2", "compute"))
