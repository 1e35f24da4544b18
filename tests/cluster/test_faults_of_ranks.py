"""The table of faults: faults of one rank's host, helper processes or data.

Elastic jobs on 2 hosts: the other ranks continue, or the job reports why it cannot."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cluster import Cluster
from tests.support.faults import PACED, ElasticJob, assert_clean, assert_same_curve
from tests.support.runs import metrics, run

TROUBLED = "--task tests.support.disturbed:Troubled --checkpoint.every 0"
HANG_SECONDS = 5
# Two ranks, whose steps take as long as the steps of four.
PACE = {"HVDTRAIN_TEST_PACE": "0.05"}


def test_dead_watchdog_is_restarted_in_the_next_generation(
    job: Callable[..., ElasticJob],
) -> None:
    running = job(np=3, hosts="node1:2 node2:1")
    running.wait_for_step(10)
    rank = running.process(1).pid
    (watchdog,) = _watchdogs(rank)
    os.kill(watchdog, signal.SIGKILL)
    running.kill(2)
    running.wait_for_world(2, 20)
    running.wait_for_world(3, 30)
    running.wait_for_more(3, 20)
    (again,) = _watchdogs(rank)
    assert again != watchdog, "it was not started again"
    done = running.end()
    log = "".join(path.read_text() for path in running.run.glob("logs/*"))
    assert log.count("watchdog ended") == 1, (log, done)


def test_survivors_continue_when_a_disk_hangs_a_task_in_rank_0(
    job: Callable[..., ElasticJob], cluster: Cluster, runs: Path
) -> None:
    run = runs / "case"
    disk = Frozen(cluster, run)  # node1 writes there; node2 has another disk in its place
    writing = f"--task tests.support.disturbed:Writing --elastic.hang_seconds {HANG_SECONDS}"
    env = {"HVDTRAIN_TEST_FILE": str(run / "of-the-task")}
    running = job(np=3, hosts="node1:1 node2:2", arguments=writing, env=env)
    running.run = own = cluster.file("node1", str(run))
    running.wait_for_step(10)
    disk.freeze()
    since, running.run = time.time(), run
    try:
        running.wait_for_world(2, HANG_SECONDS + 20)
        recovered = next(t for line in running.lines() if (t := line["time"]) > since) - since
        running.wait_for_more(3, 20)
        # The watchdog may first wait for the disk, see hung_rank.py.
        running.wait_until(
            lambda: "SIGKILL does not end it" in running.job.output(), 30, "word of its watchdog"
        )
        said = running.job.output()
        assert "process 0 on node1 is given up" in said, said
        assert "while WORKING" in said, said
    finally:
        disk.thaw()
    running.wait_for_world(3, 40)  # its slot is used again after it has ended
    running.send(signal.SIGUSR1)
    done = running.job.wait(60)
    assert done.returncode == 75, done
    after = [line["step"] for line in running.lines()]
    running.run = own
    before = [line["step"] for line in running.lines()]
    assert before == list(range(1, len(before) + 1)), done
    # The next rank 0 finds no file, and also writes the lines that it remembers.
    assert after == list(range(1, len(after) + 1)) and len(after) > len(before), done
    assert recovered < HANG_SECONDS + 12, f"{recovered:.1f} s without a step: {done}"


class Frozen:
    """A file system of node1 in which all writes block in the kernel while it is frozen."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._cluster, self._directory = cluster, directory
        directory.mkdir()
        image = directory.with_suffix(".ext4")
        with image.open("wb") as file:
            file.truncate(32 << 20)
        image, directory = shlex.quote(str(image)), shlex.quote(str(directory))  # type: ignore[assignment]
        self._run(f"/sbin/mkfs.ext4 -q -F {image} && mount -o loop,noatime {image} {directory}")

    def freeze(self) -> None:
        self._run(f"/sbin/fsfreeze -f {self._directory}")
        # If this process is killed meanwhile, only this ends the blocked writers.
        self._cluster.start(
            "node1", ["sh", "-c", f"sleep 100; /sbin/fsfreeze -u {self._directory}"]
        )

    def thaw(self) -> None:
        self._run(f"/sbin/fsfreeze -u {self._directory}")

    def _run(self, command: str) -> None:
        done = self._cluster.run("node1", ["sh", "-c", command])
        assert done.returncode == 0, done


def test_job_ends_after_three_processes_fail_on_a_bad_sample(
    job: Callable[..., ElasticJob],
) -> None:
    running = job(arguments=TROUBLED, env={"HVDTRAIN_TEST_TROUBLE": "*:sample"})
    done = running.job.wait(60)
    assert done.returncode == 1, done
    assert "failed in 3 processes with an error of their own: rank" in done.stderr, done
    assert "ValueError: a bad sample" in done.stderr.rpartition("error of their own")[2], done
    assert done.stderr.count("Traceback") == 3, done


def test_training_continues_when_a_new_process_does_not_fit(
    job: Callable[..., ElasticJob],
) -> None:
    trouble = {"HVDTRAIN_TEST_TROUBLE": "3:transfer,4:device,5:data"}
    running = job(np=3, hosts="node1:2 node2:1", arguments=TROUBLED, env=trouble)
    running.wait_for_step(10)
    running.set_hosts("node1:2 node2:2")
    running.job.wait_for("2 transfers of the run's state failed", 40)
    running.wait_for_more(10, 20)
    running.set_hosts("node1:3 node2:2")
    running.job.wait_for("the device here is meta, but the ranks on node1 use cpu", 40)
    running.job.wait_for("the training data here (255 samples", 20)
    running.wait_for_more(10, 20)
    said = running.job.output()
    assert said.count("is refused") == 3 and "process 6" not in said, said
    running.set_hosts("node1:3 node2:3")  # there may be space now
    running.wait_for_world(6, 40)
    running.end()
    assert_clean(running.run)


@pytest.mark.soak
def test_run_survives_a_discovery_gap_and_waits_for_required_ranks(
    job: Callable[..., ElasticJob], reference: list[dict[str, Any]]
) -> None:
    # A survivor and a new process also call the task's own collectives.
    task = "--task tests.support.disturbed:Collecting"
    running = job(hosts="node1:1 node2:1", np=2, min_np=2, arguments=task, env=PACE)
    running.wait_for_step(10)
    running.set_hosts("node1:1")
    running.job.wait_for("waiting for hosts", 30)
    running.set_hosts("node1:1 node2:1")
    running.wait_for_more(10, 30)
    assert "ended (" not in running.job.output(), "the processes are the same as before"
    running.set_hosts("node1:1")
    running.wait_until(
        lambda: running.job.output().count("waiting for hosts") == 2, 30, "word of the launcher"
    )
    running.kill_processes_of("node2")
    step = running.last()["step"]
    time.sleep(3)
    assert running.last()["step"] == step, "1 rank trained where 2 are the least"
    running.set_hosts("node1:1 node2:1")
    running.wait_for_more(10, 60)
    running.end()
    assert_same_curve(running.lines(), reference)


def _watchdogs(pid: int) -> list[int]:
    children = psutil.Process(pid).children()
    return [c.pid for c in children if "hvdtrain.elastic.watchdog" in c.cmdline()]


def test_stream_continues_where_it_was_after_a_kill(
    job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    task = "--task tests.support.streams:PacedStream --schedule.name constant --loader.workers 2"
    running = job(np=3, hosts="node1:2 node2:1", arguments=f"{task} --checkpoint.every 0", env=PACE)
    running.wait_for_step(8)
    running.kill(2)
    running.wait_for_world(2, 30)
    running.wait_for_world(3, 60)
    running.wait_for_more(3, 20)
    running.end()
    said = assert_clean(running.run)
    assert "continued at a saved position" in said, said
    lines = running.lines()
    alone = f"{PACED} {task} --loader.workers 0 --train.duration {len(lines)} --run.id alone"
    done = run(
        tmp_path, [*alone.split(), "--run.root", str(tmp_path)], env={"HVDTRAIN_TEST_PACE": "0"}
    )
    assert done.returncode == 0, done
    assert_same_curve(lines, metrics(tmp_path / "alone"))
