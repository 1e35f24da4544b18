"""Ranks of one host, which exchange through memory that they share (patch 0027)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.cluster import Cluster
from tests.support.faults import ElasticJob

SHARED = "/memfd:horovod"


def _shared(job: ElasticJob) -> dict[int, int]:
    """Return number of a process -> number of memories that it shares."""
    counts = {}
    for number in job.numbers():
        maps = Path(f"/proc/{job.process(number).pid}/maps").read_text()
        counts[number] = maps.count(SHARED)
    return counts


def test_survivors_share_new_memory_and_free_the_old_one(job: Callable[..., ElasticJob]) -> None:
    running = job(hosts="node1:3", np=3)
    for _ in range(3):
        running.wait_for_world(3, 90)
        running.wait_for_more(5, 30)
        assert set(_shared(running).values()) == {1}
        running.kill(running.numbers()[-1])
        running.wait_for_world(2, 30)
    running.wait_for_world(3, 90)
    running.end()


def test_ranks_in_separate_pid_namespaces_use_sockets(cluster: Cluster) -> None:
    apart = "unshare --pid --fork --mount-proc"
    # Not `cluster.python`, whose ranks are forked outside the namespaces.
    command = f"horovodrun --gloo -np 2 {apart} {sys.executable} -m tests.support.shared_sums"
    settings = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    done = cluster.run("node1", command.split(), settings, timeout=90)
    assert done.returncode == 0, done
    assert re.findall(r"rank (\d) shares 0", done.stdout), done
    assert len(re.findall("do not share memory.*PID namespaces", done.stderr)) == 1, done
