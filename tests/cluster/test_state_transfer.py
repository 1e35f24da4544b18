"""State transfer to a process that joins a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.faults import ElasticJob, assert_same_curve

DYING = "--task tests.support.interrupted_transfers:DyingSource --checkpoint.every 0"


def test_partial_state_is_discarded_if_its_source_dies(
    job: Callable[..., ElasticJob], reference: list[dict[str, Any]]
) -> None:
    running = job(hosts="node1:1", np=1, arguments=DYING)
    running.wait_for_step(20)
    running.set_hosts("node1:1 node2:1")
    # It is the only rank left, and nothing was saved: the run starts from the beginning.
    running.wait_until(lambda: len(running.events("start")) > 1, 60, "second start")
    assert running.events("start")[1]["source"] == "new"
    running.set_hosts("node2:1")  # process 2 is not needed
    running.wait_for_step(5, 30)
    running.end()
    assert_same_curve(running.lines(), reference)
    assert (running.run / "left_metrics.jsonl").exists()


@pytest.mark.soak
def test_state_survives_a_source_that_dies_while_sending_a_newer_one(
    job: Callable[..., ElasticJob], reference: list[dict[str, Any]]
) -> None:
    flags = "--task tests.support.interrupted_transfers:LostAhead --checkpoint.every 0"
    env = {"HVDTRAIN_TEST_STEP": "7", "HVDTRAIN_TEST_PACE": "0.02"}
    running = job(hosts="node1:2 node2:1", np=3, arguments=flags, env=env)
    running.wait_for_step(7)
    running.wait_until(lambda: len(running.events("start")) > 1, 60, "second start")
    second = running.events("start")[1]
    assert (second["source"], second["step"]) == ("memory", 6)
    running.wait_for_more(3, 30)
    running.end()
    assert_same_curve(running.lines(), reference)


def test_removal_of_a_host_does_not_fail_the_step_of_a_late_rank(
    job: Callable[..., ElasticJob], reference: list[dict[str, Any]]
) -> None:
    flags = "--task tests.support.interrupted_transfers:LateFigures --telemetry.exchange_every 1"
    running = job(hosts="node1:1 node2:1", np=2, arguments=flags)
    running.wait_for_step(5)
    running.set_hosts("node1:1")
    running.wait_for_world(1, 30)
    done = running.end()
    assert [event["cause"] for event in running.events("start")] == ["launch", "hosts"], done
    assert_same_curve(running.lines(), reference)


@contextmanager
def _slow_network(cluster: Cluster) -> Iterator[None]:
    """Limit each host to 100 Mbit/s."""
    shaped = ["rate", "100mbit", "burst", "256kb", "latency", "100ms"]
    try:
        for host in cluster.names:
            done = cluster.run(
                host, ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *shaped]
            )
            assert done.returncode == 0, done
        yield
    finally:
        for host in cluster.names:
            cluster.run(host, ["tc", "qdisc", "del", "dev", "eth0", "root"])


@pytest.mark.alone
def test_state_transfer_may_take_longer_than_the_collective_timeout(
    cluster: Cluster,
    job: Callable[..., ElasticJob],
    reference: list[dict[str, Any]],
    record_property: Callable[[str, object], None],
) -> None:
    # One tensor takes 3.2 s on the wire; a collective has 2.
    flags = "--task tests.support.interrupted_transfers:LargeState --checkpoint.every 0"
    flags += " --elastic.timeout_seconds 2"
    with _slow_network(cluster):
        running = job(hosts="node1:1", np=1, arguments=flags, env={"HVDTRAIN_TEST_MEGABYTES": "40"})
        running.wait_for_step(10)
        running.set_hosts("node1:1 node2:1")
        running.wait_for_world(2, 60)
        running.wait_for_more(5, 30)
        done = running.end()
    record_property("seconds", [event["seconds"] for event in running.events("start")][-1])
    assert [event["cause"] for event in running.events("start")] == ["launch", "hosts"], done
    assert_same_curve(running.lines(), reference)
