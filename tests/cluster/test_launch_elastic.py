"""`hvdtrain launch --controller gloo`: dead ranks are replaced, a dead job is restarted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster
from tests.support.job import poll
from tests.support.supervised import ALL, HOSTS, SLOW, TEST_SECONDS, Record, Supervised

STEPS = 300

pytestmark = pytest.mark.timeout(TEST_SECONDS + 120)


@pytest.fixture(scope="module")
def one_run(two_hosts: Cluster) -> Iterator[Supervised]:
    """One run for the tests below, one after another."""
    root = two_hosts.shared / "launch-elastic"
    root.mkdir()
    task = f"{SLOW} --train.duration {STEPS}"
    one_run = Supervised(two_hosts, root, f"{HOSTS} --controller gloo", task)
    yield one_run
    one_run.job.kill()
    two_hosts.kill(two_hosts.ranks())


def test_killed_rank_is_replaced_without_a_restart_of_the_job(
    supervised: Supervised, undisturbed: list[float]
) -> None:
    supervised.train_on(ALL)
    fault_at = time.time()
    supervised.cluster.kill(supervised.cluster.ranks("node1")[:1])
    supervised.recovery(fault_at)
    supervised.train_on(ALL)
    causes = [start["cause"] for start in supervised.starts() if start["time"] > fault_at]
    assert causes[0] == "failure" and "launch" not in causes, supervised.job.output()
    assert not supervised.steps_again(fault_at), "a step was done twice"
    supervised.check_curve(undisturbed)


def test_death_of_all_ranks_costs_only_the_steps_since_the_checkpoint(
    supervised: Supervised, undisturbed: list[float], record_property: Record
) -> None:
    supervised.train_on(ALL)
    fault_at = time.time()
    supervised.cluster.kill(supervised.cluster.ranks())
    seconds, lost = supervised.recovery(fault_at)
    supervised.check_curve(undisturbed)
    supervised.check_recovery(seconds, lost, record_property)


@pytest.mark.soak
def test_killed_supervisor_ends_its_ranks_and_its_run_resumes(
    supervised: Supervised, undisturbed: list[float], record_property: Record
) -> None:
    supervised.train_on(ALL)
    fault_at = time.time()
    os.kill(supervised.supervisor(), signal.SIGKILL)
    poll(lambda: not supervised.cluster.ranks(), 15, "the end of its ranks")
    record_property("ranks_gone_seconds", round(time.time() - fault_at, 1))
    fault_at = time.time()
    supervised.start("node2")
    seconds, lost = supervised.recovery(fault_at)
    supervised.check_curve(undisturbed)
    supervised.check_recovery(seconds, lost, record_property)


@pytest.mark.soak
def test_terminated_supervisor_saves_a_checkpoint_and_exits_with_75(
    supervised: Supervised, undisturbed: list[float]
) -> None:
    supervised.train_on(ALL)
    os.kill(supervised.supervisor(), signal.SIGTERM)
    stopped = supervised.job.wait(60)
    assert stopped.returncode == 75, stopped
    last = supervised.lines()[-1]["step"]
    began = time.time()
    supervised.finish(undisturbed)
    first = next(start for start in supervised.starts() if start["time"] > began)
    assert first["step"] == last, "steps were lost"
