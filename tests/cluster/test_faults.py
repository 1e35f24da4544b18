"""The table of faults: each is injected into a real elastic job on real hosts.

No step is lost or done twice, and the losses equal an undisturbed run's. `record_property`
puts the measured seconds into the report (`pytest -rA`, junit).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.support.cluster import Cluster
from tests.support.faults import ElasticJob, assert_same_curve, pause

# Other programs on the machine affect the seconds that are checked here.
pytestmark = pytest.mark.alone
FOUR = 4
# Two ranks, whose steps take as long as the steps of four.
TWO: dict[str, Any] = {"np": 2, "env": {"HVDTRAIN_TEST_PACE": "0.05"}}

Record = Callable[[str, object], None]


class Case(NamedTuple):
    """After `fault` the next step, on the `left` remaining ranks (None: new ranks may have joined
    already), must end within `seconds`."""

    fault: Callable[[ElasticJob], None]
    left: int | None
    seconds: float


def _three_in_one_recovery(job: ElasticJob) -> None:
    _, second, third, fourth = job.numbers()
    for number in (fourth, second, third):
        job.kill(number)
        time.sleep(0.1)


# Process numbers are in rank order. The faults of a line are injected into one job in turn, each
# when all four ranks train again.
KILLS = {
    "kill one": Case(lambda job: job.kill(job.numbers("node2")[-1]), 3, 1),
    "kill rank 0": Case(lambda job: job.kill(job.numbers()[0]), 3, 1),
    "kill two on two hosts": Case(
        lambda job: job.kill(job.numbers("node1")[-1], job.numbers("node2")[0]), 2, 1
    ),
    "kill all of a host": Case(lambda job: job.kill_processes_of("node2"), 2, 2),
}
# In a separate job: what is stopped is noticed by the CPU time that it does not use, and ranks that
# start on the same machine delay everything. A stopped rank costs about 2 s: its watchdog kills it
# after 1 s.
STOPS = {
    "stop one for ever": Case(lambda job: job.stop(job.numbers("node2")[0]), 3, 2.7),
    # The agent continues the watchdog.
    "stop one with its watchdog": Case(
        lambda job: job.stop(job.numbers("node2")[0], watchdog=True), 3, 4.7
    ),
}
OTHERS = {
    "three killed in one recovery": Case(_three_in_one_recovery, None, 8),
    "down to one rank": Case(lambda job: job.kill(*job.numbers()[1:]), 1, 2),
}


def _check_cases(running: ElasticJob, cases: dict[str, Case], record: Record) -> None:
    """Inject one fault after another; at the end all four ranks train again."""
    seconds = {}
    for fault, case in cases.items():
        running.wait_for_world(FOUR, 90)  # the slots are used again
        running.wait_for_more(5, 30)
        since = time.time()
        case.fault(running)
        running.wait_for_start(time.time(), 30)
        # Check the first step: new processes may have joined already.
        start = next(event for event in running.events("start") if event["time"] > since)
        seconds[fault] = round(pause(running.lines(), since), 2)
        assert start["cause"] == "failure", (fault, start)
        assert case.left in (None, start["world_size"]), (fault, start)
    running.wait_for_world(FOUR, 90)
    record("seconds", seconds)
    late = [fault for fault, case in cases.items() if seconds[fault] > case.seconds]
    assert not late, f"{late} took too long: {seconds}: {running.job.output()}"


def _check_job(
    running: ElasticJob, cases: dict[str, Case], reference: list[dict[str, Any]], record: Record
) -> None:
    """Inject only these faults into a job, and end it: no step is lost or done twice."""
    running.wait_for_step(20)
    _check_cases(running, cases, record)
    running.end()
    assert_same_curve(running.lines(), reference)
    assert not (running.run / "left_metrics.jsonl").exists(), "a step was done twice"


@pytest.mark.timeout(400)
def test_survivors_continue_after_rank_is_killed(
    job: Callable[..., ElasticJob], reference: list[dict[str, Any]], record_property: Record
) -> None:
    # A death is detected at once, whatever the timeout: patch 0003 of Horovod's wheel.
    running = job(arguments="--elastic.timeout_seconds 20")
    _check_job(running, KILLS, reference, record_property)


@pytest.mark.timeout(400)
def test_survivors_continue_after_a_rank_is_stopped(
    job: Callable[..., ElasticJob], reference: list[dict[str, Any]], record_property: Record
) -> None:
    running = job()
    _check_job(running, STOPS, reference, record_property)


@pytest.mark.timeout(400)
def test_no_step_is_lost_when_a_rank_hangs_or_hosts_change(
    job: Callable[..., ElasticJob], reference: list[dict[str, Any]], record_property: Record
) -> None:
    hangs = {"HVDTRAIN_TEST_HANG": "2:15:8,3:30"}
    running = job(hosts="node1:2", np=2, arguments="--elastic.hang_seconds 3", env=hangs)
    running.wait_for_step(5)
    running.set_hosts("node1:2 node2:2")
    # Processes 2 and 3 hang there; one of them computes for a while and is not killed.
    running.wait_for_world(FOUR, 60)
    first = running.last()["step"]
    running.wait_for_step(first + 20)
    among = [line["world_size"] for line in running.lines() if first <= line["step"] < first + 15]
    assert set(among) == {FOUR}, "a slow one that lives was killed"
    running.wait_for_world(FOUR - 1, 30)
    _check_stacks(running)
    _check_cases(running, OTHERS, record_property)
    running.wait_for_more(5, 30)
    running.set_hosts("node1:2")
    running.wait_for_world(2, 30)
    running.wait_for_more(10, 30)
    running.end()
    assert_same_curve(running.lines(), reference)
    assert not (running.run / "left_metrics.jsonl").exists(), "a step was done twice"


def _check_stacks(running: ElasticJob) -> None:
    """The stacks of the hung process show where it hangs."""
    text = (running.run / "logs/hang_node2_1.txt").read_text()
    assert "no progress, no work" in text and "_get_stuck" in text, text


def test_survivors_continue_after_a_cut_link_and_the_host_rejoins(
    cluster: Cluster,
    job: Callable[..., ElasticJob],
    reference: list[dict[str, Any]],
    record_property: Record,
) -> None:
    discover = "python -m hvdtrain.cli discover --hosts node1:2,node2:2"
    running = job(discovery=discover)
    running.wait_for_step(20)
    since = time.time()
    cluster.link("node2", up=False)
    try:
        running.wait_for_world(2, 30)
        recovered = pause(running.lines(), since)
        time.sleep(max(0.0, since + 15 - time.time()))
    finally:
        cluster.link("node2", up=True)
    back = time.time()
    running.wait_for_world(FOUR, 40)
    joined = running.last()["time"] - back
    running.wait_for_more(5, 30)
    done = running.end()
    record_property("seconds", f"{recovered:.2f}, joined again after {joined:.1f}")
    assert_same_curve(running.lines(), reference)
    assert recovered <= 2, f"{recovered:.2f} s without a step: {done}"
    assert "the agent of node2 is gone (no message for" in running.job.output()
    (start,) = (e for e in running.events("start") if e["cause"] == "failure")
    assert "on node2 fell silent: no message for" in str(start["silent"])
    assert joined <= 20, f"joined {joined:.1f} s after the link was there again: {done}"


def test_launcher_without_ranks_survives_a_short_link_failure(
    cluster: Cluster, job: Callable[..., ElasticJob], reference: list[dict[str, Any]]
) -> None:
    running = job(hosts="node2:2", **TWO)
    running.wait_for_step(40)
    cluster.link("node1", up=False)
    try:
        time.sleep(4.5)
    finally:
        cluster.link("node1", up=True)
    running.wait_for_more(20, 30)
    running.end()
    assert_same_curve(running.lines(), reference)
    assert len(running.events("start")) == 1, running.job.output()


def test_network_that_fails_for_a_moment_ends_no_rank(
    cluster: Cluster, job: Callable[..., ElasticJob], reference: list[dict[str, Any]]
) -> None:
    running = job(hosts="node1:1 node2:1", **TWO)
    running.wait_for_step(40)
    for _ in range(5):
        cluster.part("node1", "node2", leave=False)
        try:
            time.sleep(0.4)
        finally:
            cluster.part("node1", "node2", leave=True)
        time.sleep(2.5)
    running.wait_for_more(20, 30)
    running.end()
    assert_same_curve(running.lines(), reference)
    assert len(running.events("start")) == 1, running.job.output()
