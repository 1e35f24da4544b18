"""The table of faults: each is done to a real elastic job between real hosts.

No step is lost, none is done twice, and the losses are those of an undisturbed run.
`record_property` puts the measured seconds into the report (`pytest -rA`, junit).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.support.cluster import Cluster
from tests.support.faults import PACED, ElasticJob, assert_same_curve, pause
from tests.support.runs import metrics, run

FOUR = 4


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Losses of the undisturbed run: one process, no launcher."""
    root = tmp_path_factory.mktemp("reference")
    arguments = f"{PACED} --run.root {root} --run.id case".split()
    # The schedule is that of the disturbed runs, so all their steps are done here.
    done = run(root / "output", arguments, env={"HVDTRAIN_TEST_PACE": "0"}, timeout=120)
    assert done.returncode == 0, done
    return metrics(root / "case")


class Case(NamedTuple):
    """After `fault` the next step, on the `left` ranks that are left (None: new ones may be there
    already), must end within `seconds`."""

    fault: Callable[[ElasticJob], None]
    left: int | None
    seconds: float


def _three_in_one_recovery(job: ElasticJob) -> None:
    _, second, third, fourth = job.numbers()
    for number in (fourth, second, third):
        job.kill(number)
        time.sleep(0.1)


# Process numbers rise in the order of the ranks. The faults of a line are done to one job in turn,
# each when all four ranks train again.
KILLS = {
    "kill one": Case(lambda job: job.kill(job.numbers("node2")[-1]), 3, 1),
    "kill rank 0": Case(lambda job: job.kill(job.numbers()[0]), 3, 1),
    "kill two on two hosts": Case(
        lambda job: job.kill(job.numbers("node1")[-1], job.numbers("node2")[0]), 2, 1
    ),
    "kill all of a host": Case(lambda job: job.kill_processes_of("node2"), 2, 2),
}
OTHERS = {
    "stop one for ever": Case(lambda job: job.stop(job.numbers("node2")[0]), 3, 2),
    # A false alarm: the process itself is well, and may not do a step after it was given up.
    "stop the watchdog of one": Case(lambda job: job.stop_watchdog(job.numbers("node2")[0]), 3, 2),
    "three killed in one recovery": Case(_three_in_one_recovery, None, 8),
    "down to one rank": Case(lambda job: job.kill(*job.numbers()[1:]), 1, 2),
}
CASES = {
    # A death is noticed at once, whatever the timeout: patch 0003 of Horovod's wheel.
    "kills": (KILLS, "--elastic.timeout_seconds 20"),
    "others": (OTHERS, ""),
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
def test_a_fault_loses_a_step_or_takes_too_long(
    job: Callable[..., ElasticJob],
    reference: list[dict[str, Any]],
    name: str,
    record_property: Callable[[str, object], None],
) -> None:
    cases, arguments = CASES[name]
    running = job(arguments=arguments)
    running.wait_for_step(20)
    seconds = {}
    for fault, case in cases.items():
        running.wait_for_world(FOUR, 90)  # the slots are used again
        running.wait_for_more(5, 30)
        since = time.time()
        case.fault(running)
        running.wait_for_start(time.time(), 30)
        # The first one: new processes may have joined already.
        start = next(event for event in running.events("start") if event["time"] > since)
        seconds[fault] = round(pause(running.lines(), since), 2)
        assert start["cause"] == "failure", (fault, start)
        assert case.left in (None, start["world_size"]), (fault, start)
    running.wait_for_world(FOUR, 90)
    done = running.end()
    record_property("seconds", seconds)
    assert_same_curve(running.lines(), reference)
    late = [fault for fault, case in cases.items() if seconds[fault] > case.seconds]
    assert not late, f"{late} took too long: {seconds}: {done}"
    assert not (running.run / "left_metrics.jsonl").exists(), "a step was done twice"


def test_a_link_that_is_cut_stops_training_or_keeps_its_host_out(
    cluster: Cluster,
    job: Callable[..., ElasticJob],
    reference: list[dict[str, Any]],
    record_property: Callable[[str, object], None],
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
    assert "fell silent: nothing heard for" in running.job.output()
    (start,) = (e for e in running.events("start") if e["cause"] == "failure")
    assert "on node2 fell silent: nothing heard for" in str(start["silent"])
    assert joined <= 20, f"joined {joined:.1f} s after the link was there again: {done}"


def test_a_link_that_is_cut_stops_training_where_datagrams_do_not_get_through(
    cluster: Cluster,
    job: Callable[..., ElasticJob],
    reference: list[dict[str, Any]],
    record_property: Callable[[str, object], None],
) -> None:
    cluster.datagrams("node2", leave=False)
    try:
        running = job()
        running.wait_for_step(20)
        since = time.time()
        cluster.link("node2", up=False)
        running.set_hosts("node1:2")
        running.wait_for_world(2, 30)
        recovered = pause(running.lines(), since)
    finally:
        cluster.link("node2", up=True)
        cluster.datagrams("node2", leave=True)
    running.wait_for_more(5, 30)
    done = running.end()
    record_property("seconds", round(recovered, 2))
    assert_same_curve(running.lines(), reference)
    assert recovered <= 8, f"{recovered:.2f} s without a step: {done}"
    assert "fell silent" not in running.job.output()


def test_hosts_that_come_and_go_lose_a_step(
    job: Callable[..., ElasticJob], reference: list[dict[str, Any]]
) -> None:
    running = job(hosts="node1:2", np=2)
    running.wait_for_step(20)
    running.set_hosts("node1:2 node2:2")
    running.wait_for_world(FOUR, 60)
    running.wait_for_more(10, 30)
    running.set_hosts("node1:2")
    running.wait_for_world(2, 30)
    running.wait_for_more(10, 30)
    running.end()
    assert_same_curve(running.lines(), reference)
    assert not (running.run / "left_metrics.jsonl").exists(), "a step was done twice"


def test_fewer_ranks_than_the_least_end_the_run_or_go_on(
    job: Callable[..., ElasticJob], reference: list[dict[str, Any]]
) -> None:
    running = job(np=4, min_np=3)
    running.wait_for_step(20)
    running.set_hosts("node1:2")
    running.job.wait_for("node2 is not there any more", 30)
    running.kill_processes_of("node2")
    running.job.wait_for("waiting for hosts", 30)
    step = running.last()["step"]
    time.sleep(5)
    assert running.last()["step"] == step, "2 ranks trained where 3 are the least"
    running.set_hosts("node1:2 node2:2")
    running.wait_for_more(20, 60)
    running.end()
    assert_same_curve(running.lines(), reference)


def test_a_deadlocked_rank_holds_up_the_others_or_does_not_say_where(
    job: Callable[..., ElasticJob], reference: list[dict[str, Any]]
) -> None:
    running = job(arguments="--elastic.hang_seconds 3", env={"HVDTRAIN_TEST_HANG": "3:20"})
    running.wait_for_step(40)
    running.end()
    assert_same_curve(running.lines(), reference)
    (stacks,) = running.run.glob("logs/hang_node2_1.txt")
    text = stacks.read_text()
    assert "no progress, no work" in text and "_get_stuck" in text, text


def test_a_slow_rank_that_lives_is_killed(
    job: Callable[..., ElasticJob], reference: list[dict[str, Any]]
) -> None:
    running = job(arguments="--elastic.hang_seconds 3", env={"HVDTRAIN_TEST_HANG": "3:20:8"})
    running.wait_for_step(30)
    running.end()
    assert {line["world_size"] for line in running.lines()} == {FOUR}
    assert_same_curve(running.lines(), reference)
