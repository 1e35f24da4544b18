"""The table of faults: threats to the state, such as preemption, disk faults and flipped bits.

Ranks on 2 hosts. Every run that ends passes `hvdtrain audit`, has each step in metrics.jsonl
once, and the losses of an undisturbed run. `record_property` stores the measured values."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from hvdtrain.checkpoint.layout import finished, verify
from tests.support import runs as local
from tests.support.cluster import Cluster
from tests.support.faults import (
    PACED,
    START_SECONDS,
    ElasticJob,
    MpiJob,
    TrainingJob,
    assert_clean,
    assert_same_curve,
    pause,
)

HELD = (
    "--task tests.support.disturbed:Held --train.duration 150 --eval.every 10 --checkpoint.every 15"
)
NO_PACE = {"HVDTRAIN_TEST_PACE": "0"}
# Two ranks, whose steps take as long as the steps of four.
PACE_OF_TWO = {"HVDTRAIN_TEST_PACE": "0.05"}
# Rank 0 of an elastic run polls the launcher every half second.
NEWS_SECONDS = 0.7

# A chain of five starts on a busy machine.
pytestmark = pytest.mark.timeout(600)

Record = Callable[[str, object], None]
J = TypeVar("J", MpiJob, ElasticJob)


class Start(Protocol):
    """Start a job in the test's directory, on both hosts; `env` is added to its environment."""

    def __call__(self, kind: type[J], arguments: str = HELD, np: int = ..., **env: str) -> J: ...


@pytest.fixture
def start(cluster: Cluster, runs: Path) -> Iterator[Start]:
    jobs: list[TrainingJob] = []

    def start(kind: type[J], arguments: str = HELD, np: int = 4, **env: str) -> J:
        where = {"hosts": f"node1:{np // 2} node2:{np // 2}"} if kind is ElasticJob else {}
        job = kind(cluster, runs, arguments=arguments, np=np, env=env, **where)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        job.job.kill()


@pytest.fixture
def hold(runs: Path) -> Path:
    """Return the file by which process 0 reports that it waits at a place, see Held."""
    return runs / "hold"


@pytest.fixture(scope="module")
def undisturbed(two_hosts: Cluster) -> Path:
    """The directory of the undisturbed run."""
    root = two_hosts.shared / "undisturbed"
    root.mkdir()
    MpiJob(two_hosts, root, f"{HELD} --checkpoint.keep 10", NO_PACE).ended(0)
    return root / "case"


# --- preemption ------------------------------------------------------------

# Where each start is asked to stop, and by which signal to its launcher. mpirun forwards SIGUSR1;
# after SIGTERM it gives its ranks almost no time.
STOPS: dict[str, tuple[type[TrainingJob], dict[str, signal.Signals]]] = {
    "horovodrun": (
        ElasticJob,
        {
            "start-up": signal.SIGTERM,
            "step": signal.SIGUSR1,
            "evaluation": signal.SIGTERM,
            "save": signal.SIGUSR1,
        },
    ),
    "mpirun": (
        MpiJob,
        {"start-up": signal.SIGUSR1, "step": signal.SIGUSR1, "save": signal.SIGUSR1},
    ),
}


@pytest.mark.parametrize(
    "launcher", [pytest.param(n, marks=pytest.mark.soak) if n == "mpirun" else n for n in STOPS]
)
def test_preempted_run_exits_with_75_and_loses_no_step(
    start: Start, hold: Path, undisturbed: Path, launcher: str, record_property: Record
) -> None:
    kind, stops = STOPS[launcher]
    for place, number in stops.items():
        running = start(kind, np=2, HVDTRAIN_TEST_HOLD=f"{place}:{hold}", **PACE_OF_TWO)
        record_property(place, _stop(running, place, number, hold))
    running = start(kind, np=2, **NO_PACE)
    running.ended(0)
    begun = [(event["step"], event["source"]) for event in running.events("start")]
    stopped_at = [(event["step"], "checkpoint") for event in running.events("end")]
    assert begun == [(0, "new"), *stopped_at[:-1]]
    assert not (running.run / "left_metrics.jsonl").exists(), "a step was done twice"
    assert_same_curve(running.lines(), local.metrics(undisturbed))


@pytest.mark.soak
def test_spot_host_with_a_notice_leaves_without_a_lost_step(
    start: Start, cluster: Cluster, runs: Path, undisturbed: Path
) -> None:
    notice = runs / "notice"
    added = cluster.run("node2", ["ip", "addr", "add", "169.254.169.254/32", "dev", "lo"])
    assert added.returncode == 0, added
    # node1 has no such address: its requests fail, or wait for a response.
    service = f"python -m tests.support.metadata 169.254.169.254 80 {notice}".split()
    metadata = cluster.start("node2", service)
    try:
        metadata.wait_for("listening", 30)
        running = start(ElasticJob, f"{HELD} --preempt.notice aws")
        running.wait_for_step(10)
        notice.touch()
        running.wait_for_world(2, 30)
        running.wait_until(lambda: running.numbers("node2") == [], 30, "the end of node2's ranks")
        done = running.ended(0)
    finally:
        metadata.kill()
    assert "node2 leaves: notice from aws" in done.stderr, done
    left = next(event for event in running.events("start") if event["world_size"] == 2)
    seen = (left["cause"], left["lost_steps"], left["hosts"])
    assert seen == ("hosts", 0, {"node1": [0, 1]}), (running.events("start"), done)
    assert not (running.run / "left_metrics.jsonl").exists(), "a step was done twice"
    assert_same_curve(running.lines(), local.metrics(undisturbed))


def _stop(running: TrainingJob, place: str, number: signal.Signals, hold: Path) -> str:
    """Ask a job to stop at a place; it must end with 75. Return its metrics."""
    if place == "start-up":
        running.wait_until(lambda: _catching(running.cluster) == 2, START_SECONDS, "handlers")
    else:
        running.wait_until(hold.exists, START_SECONDS, f"{place} of process 0")
    reached, since = running.last().get("step", 0), time.monotonic()
    running.send(number)
    if place != "start-up":
        time.sleep(NEWS_SECONDS)
        hold.unlink()
    running.ended(75)
    steps = running.events("end")[-1]["step"] - reached
    return f"{time.monotonic() - since:.1f} s, {steps} steps"


def _catching(cluster: Cluster) -> int:
    """Return the ranks that have installed their SIGUSR1 handler; torch is imported afterwards."""
    count = 0
    for process in cluster.ranks():
        with suppress(OSError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            caught = int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16)
            count += bool(caught >> (signal.SIGUSR1 - 1) & 1)
    return count


# --- damaged checkpoints ---------------------------------------------------


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "torn": lambda directory: (directory / "optimizer.safetensors").unlink(),
    "truncated": lambda directory: os.truncate(directory / "model.safetensors", 100),
    "flipped": lambda directory: _flip(directory / "model.safetensors"),
    "no list of files": lambda directory: (directory / "files.json").unlink(),
    "no marker": lambda directory: (directory / "complete").unlink(),
}


def test_resume_skips_damaged_checkpoints(undisturbed: Path, tmp_path: Path) -> None:
    # Only rank 0 selects and reads a checkpoint, so one process can resume from 4 ranks'
    # checkpoint.
    run = shutil.copytree(undisturbed, tmp_path / "case")
    # On a busy machine a save may have been omitted, because the previous one was in progress.
    newest = sorted((run / "checkpoints").glob("step_*"), reverse=True)
    whole = newest[len(DAMAGES)]
    del newest[len(DAMAGES) :]
    for directory, damage in zip(newest, DAMAGES.values(), strict=True):
        damage(directory)
    flags = f"{PACED} {HELD} --run.root {tmp_path} --run.id case".split()
    done = local.run(tmp_path / "output", flags, env=NO_PACE)
    assert done.returncode == 0, done
    for directory, damage in zip(newest, DAMAGES, strict=True):
        assert directory.name in done.stderr, (damage, done)
    assert f"resumed from the checkpoint of step {int(whole.name[-8:])}" in done.stderr, done
    assert_same_curve(local.metrics(run), local.metrics(undisturbed))
    assert_clean(run)
    _assert_whole_checkpoints(run, newest=150)


def _assert_whole_checkpoints(run: Path, newest: int) -> None:
    """Check that all checkpoints are intact, and that no incomplete one is left."""
    root = run / "checkpoints"
    names = [path.name for path in root.iterdir() if not path.name.startswith("left_")]
    assert sorted(names) == [path.name for path in finished(root)]
    assert max(names) == f"step_{newest:08}"
    for directory in finished(root):
        verify(directory)


def test_death_of_rank_0_in_a_save_leaves_only_whole_checkpoints(
    start: Start, hold: Path, undisturbed: Path, record_property: Record
) -> None:
    running = start(ElasticJob, HVDTRAIN_TEST_HOLD=f"save:{hold}")
    running.wait_until(hold.exists, START_SECONDS, "save of process 0")
    root = running.run / "checkpoints"
    (half,) = root.iterdir()
    assert half.name.startswith(".step_00000015.") and (half / "model.safetensors").exists()
    since = time.time()
    running.kill(0)
    running.wait_until(lambda: bool(finished(root)), 30, "a checkpoint by the next rank 0")
    record_property("seconds to the next checkpoint", round(time.time() - since, 2))
    running.wait_for_more(5, 60)
    record_property("seconds without a step", round(pause(running.lines(), since), 2))
    running.end()
    assert {line["world_size"] for line in running.lines()} == {3, 4}
    assert_same_curve(running.lines(), local.metrics(undisturbed))
    assert not (running.run / "left_metrics.jsonl").exists(), "a step was done twice"
    _assert_whole_checkpoints(running.run, newest=running.last()["step"])


def test_run_completes_if_a_rank_dies_in_the_last_save(
    start: Start, hold: Path, undisturbed: Path, record_property: Record
) -> None:
    flags = f"{HELD} --checkpoint.every 1000"
    running = start(ElasticJob, flags, HVDTRAIN_TEST_HOLD=f"save:{hold}", HVDTRAIN_TEST_PACE="0.01")
    running.wait_until(hold.exists, START_SECONDS, "the last save")
    since = time.time()
    running.kill(3)
    running.wait_until(
        lambda: running.events("start")[-1]["world_size"] == 3, 20, "3 ranks that continue"
    )
    record_property("seconds until they met", round(running.events("start")[-1]["time"] - since, 2))
    hold.unlink()
    running.ended(0)
    assert_same_curve(running.lines(), local.metrics(undisturbed))
    _assert_whole_checkpoints(running.run, newest=150)


# --- disks -----------------------------------------------------------------


@pytest.mark.alone
def test_training_continues_on_a_blocked_or_full_disk_with_a_warning(
    cluster: Cluster,
    start: Start,
    runs: Path,
    hold: Path,
    undisturbed: Path,
    record_property: Record,
) -> None:
    # Only the writer thread uses the disk, and only the end of a run waits for it: a disk that
    # blocks for a minute has the same effect as one that blocks past the hang limit.
    blocked_seconds, hang_seconds = 5, 3
    run = runs / "case"
    run.mkdir()
    # Only rank 0's host has a small disk for the run.
    _check(cluster, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(run))
    try:
        flags = f"{HELD} --telemetry.port 9855 --elastic.hang_seconds {hang_seconds}"
        running = start(ElasticJob, flags, np=2, HVDTRAIN_TEST_HOLD=f"save:{hold}", **PACE_OF_TWO)
        running.run = cluster.file("node1", str(run))
        running.wait_until(hold.exists, START_SECONDS, "save of process 0")
        blocked_at = time.time()
        running.job.wait_for("the checkpoint of step 15 is still being written", 30)
        time.sleep(max(0.0, blocked_at + blocked_seconds - time.time()))
        assert not finished(running.run / "checkpoints")
        hold.unlink()
        running.wait_until(lambda: bool(finished(running.run / "checkpoints")), 20, "a checkpoint")
        longest = pause(running.lines(), blocked_at)
        record_property("longest step on a blocked disk", round(longest, 2))

        _fill(running.run)
        full_at = running.last()["step"]
        running.wait_until(lambda: _failures(cluster) == 2, 30, "two failed saves in the metrics")
        (running.run / "ballast").unlink()
        running.wait_until(
            lambda: finished(running.run / "checkpoints")[-1].name > f"step_{full_at + 30:08}",
            30,
            "a checkpoint after the disk was full",
        )
        done = running.end()
        record_property(
            "steps while full and until the next save", running.last()["step"] - full_at
        )
        record_property("longest step", round(pause(running.lines(), blocked_at), 2))
        assert longest < blocked_seconds / 2, done
        assert done.stderr.count(" could not be written (OSError: ") == 2, done
        assert "2 checkpoints could not be written" in done.stderr, done
        assert_same_curve(running.lines(), local.metrics(undisturbed))
        assert {line["world_size"] for line in running.lines()} == {2}
        _assert_whole_checkpoints(running.run, newest=running.last()["step"])
    finally:
        _check(cluster, "umount", "--lazy", str(run))


def _check(cluster: Cluster, *command: str) -> str:
    """Run a command on node1 that must succeed; return its output."""
    done = cluster.run("node1", command)
    assert done.returncode == 0, done
    return done.stdout


def _fill(directory: Path) -> None:
    with suppress(OSError), open(directory / "ballast", "wb", buffering=0) as file:
        while True:
            file.write(bytes(512))


def _failures(cluster: Cluster) -> float:
    """Return hvdtrain_checkpoint_failures_total of rank 0, as Prometheus would read it."""
    read = (
        "import urllib.request as r; print(r.urlopen('http://node1:9855/metrics').read().decode())"
    )
    text = _check(cluster, "timeout", "10", "python", "-c", read)
    return float(re.findall(r"^hvdtrain_checkpoint_failures_total (\S+)", text, re.MULTILINE)[0])


# --- wrong bits ------------------------------------------------------------


def test_nan_on_one_rank_skips_the_step_on_all_ranks(start: Start) -> None:
    flags = (
        "--task tests.support.tasks:NotFinite --train.duration 12 --eval.every 0"
        " --train.replica_check_every 1"  # bitwise, after each step
    )
    running = start(MpiJob, flags, HVDTRAIN_TEST_NAN="5")
    done = running.ended(0)
    lines = running.lines()
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["step"] for line in lines if line.get("skipped")] == [5], done
    assert [line["step"] for line in lines if line["loss"] is None] == [5], done
    assert not any("healed" in line for line in lines), done
    assert "steps [5]" in assert_clean(running.run)


def test_flipped_bit_is_named_with_its_host_and_healed(start: Start) -> None:
    flags = (
        "--task tests.support.tasks:Flipped --train.duration 30 --eval.every 0"
        " --train.replica_check_every 10"
    )
    running = start(MpiJob, flags, HVDTRAIN_TEST_FLIP="3:7:weight")
    done = running.ended(0)
    lines = running.lines()
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert [(line["step"], line["healed"]) for line in lines if "healed" in line] == [(10, [3])]
    named = "step 10: parameters or optimizer state of rank 3 on node2 differed"
    assert done.stderr.count(named) == 1, done
    assert "ranks [3] were healed after step 10" in assert_clean(running.run)
