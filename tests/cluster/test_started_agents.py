"""Agents that an elastic horovodrun starts over ssh: one session per host."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.cluster import Cluster, Process
from tests.support.faults import ElasticJob, assert_same_curve
from tests.support.job import Job, poll

SIX = ["horovodrun", "-np", "6", "--min-np", "1", "-H", "node1:2,node2:4", "sh", "-c"]
# Any hexadecimal text as long as a secret of the job.
SECRET = re.compile(r"\b[0-9a-f]{32,}\b")


@pytest.fixture
def shells(cluster: Cluster) -> Iterator[Callable[[str], Job]]:
    """Start six shells instead of ranks, with hvdtrain's launcher."""
    jobs = []

    def start(script: str) -> Job:
        jobs.append(cluster.start("node1", [*SIX, script], {"HVDTRAIN_ELASTIC": "1"}))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


def _sessions(cluster: Cluster, to: str = "node2") -> list[Process]:
    """Return the ssh clients of the launcher's host."""
    found = cluster.processes("node1")
    return [p for p in found if p.command.startswith("ssh ") and f" {to} " in p.command]


def _agents(cluster: Cluster, host: str | None = None) -> list[Process]:
    return cluster.processes(host, containing="-m hvdtrain.agent")


def test_agent_starts_in_one_ssh_session_and_hides_the_secret(
    cluster: Cluster, shells: Callable[[str], Job]
) -> None:
    seen: set[str] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            seen.update(process.command for process in cluster.processes())

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    job = shells("echo secret $HOROVOD_RENDEZVOUS_SECRET; exec sleep 600")
    poll(lambda: job.output().count("secret") == 6, 30, "six ranks")
    ended.set()
    looking.join(10)
    assert len(_sessions(cluster)) == 1, _sessions(cluster)
    assert not _sessions(cluster, "node1")
    assert SECRET.search(job.output()), "no secret"
    assert any("-m hvdtrain.agent" in command for command in seen)
    assert not [command for command in seen if SECRET.search(command)]


def test_killed_launcher_ends_agents_and_ranks_on_all_hosts(
    cluster: Cluster, shells: Callable[[str], Job]
) -> None:
    job = shells("trap '' TERM HUP; echo started; while :; do sleep 0.1; done")
    poll(lambda: job.output().count("started") == 6, 30, "six ranks")
    cluster.kill(p for p in cluster.processes("node1") if "/horovodrun " in p.command)

    def gone() -> bool:
        return not _agents(cluster) and not cluster.processes(containing="echo started")

    poll(gone, 10, "the end of all agents and ranks")


def test_host_is_used_again_after_its_ssh_session_was_killed(
    cluster: Cluster, job: Callable[..., ElasticJob], reference: list[dict[str, Any]]
) -> None:
    running = job()
    running.wait_for_step(10)
    (session,) = _sessions(cluster)
    cluster.kill([session])
    running.wait_for_world(2, 30)
    running.wait_for_world(4, 60)
    (new,) = _sessions(cluster)
    assert new.pid != session.pid
    running.wait_for_more(5, 30)
    running.end()
    assert_same_curve(running.lines(), reference)
    assert "the agent of node2 is gone (ssh ended" in running.job.output()


def test_killed_agent_is_replaced_without_another_ssh_session(
    cluster: Cluster, job: Callable[..., ElasticJob], reference: list[dict[str, Any]]
) -> None:
    running = job()
    running.wait_for_step(10)
    sessions = _sessions(cluster)
    agent = _agents(cluster, "node2")[1]  # the first is its keeper, the others are guards
    cluster.kill([agent])
    running.wait_for_world(2, 30)
    running.wait_for_world(4, 60)
    assert _sessions(cluster) == sessions
    running.wait_for_more(5, 30)
    running.end()
    assert_same_curve(running.lines(), reference)


def test_host_that_refuses_ssh_is_reported_and_joins_later(
    cluster: Cluster, job: Callable[..., ElasticJob]
) -> None:
    cluster.connections("node1", "node2", 22, leave=False)
    try:
        running = job(hosts="node1:1 node2:1", np=2)
        running.wait_for_step(3)
        assert running.last()["world_size"] == 1
    finally:
        cluster.connections("node1", "node2", 22, leave=True)
    running.wait_for_world(2, 60)
    running.end()
    assert re.search(r"^hvdtrain: node2: ssh: connect to host node2", running.job.output(), re.M)


def test_signal_to_an_agent_stops_the_run_with_a_checkpoint(
    cluster: Cluster, job: Callable[..., ElasticJob]
) -> None:
    running = job(hosts="node1:1 node2:1", np=2)
    running.wait_for_step(5)
    os.kill(_agents(cluster, "node2")[0].pid, signal.SIGTERM)
    running.ended(75, 30)
