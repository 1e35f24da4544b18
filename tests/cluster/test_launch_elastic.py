"""`hvdtrain launch --controller gloo`: dead ranks are replaced, a dead job is started again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_launch import FAULT_AFTER, HOSTS, TEST_SECONDS, Record, Supervised
from tests.cluster.test_launch import undisturbed as undisturbed  # a fixture
from tests.support.cluster import Cluster
from tests.support.job import poll

pytestmark = pytest.mark.timeout(TEST_SECONDS + 120)


@pytest.fixture
def supervised(cluster: Cluster, runs: Path) -> Iterator[Supervised]:
    supervised = Supervised(cluster, runs, options=f"{HOSTS} --controller gloo")
    supervised.wait_for_step(FAULT_AFTER)
    yield supervised
    supervised.job.kill()


def test_all_ranks_killed_end_the_run_or_cost_more_than_the_steps_since_the_checkpoint(
    supervised: Supervised, undisturbed: list[float], record_property: Record
) -> None:
    fault_at = time.time()
    supervised.cluster.kill(supervised.cluster.ranks())
    seconds, lost = supervised.recovery(fault_at)
    supervised.ends_as(undisturbed)
    supervised.check_recovery(seconds, lost, record_property)


def test_killed_supervisor_leaves_ranks_or_its_run_is_lost(
    supervised: Supervised, undisturbed: list[float], record_property: Record
) -> None:
    fault_at = time.time()
    os.kill(supervised.supervisor(), signal.SIGKILL)
    poll(lambda: not supervised.cluster.ranks(), 15, "the end of its ranks")
    record_property("ranks_gone_seconds", round(time.time() - fault_at, 1))
    fault_at = time.time()
    supervised.start("node2")
    seconds, lost = supervised.recovery(fault_at)
    supervised.ends_as(undisturbed)
    supervised.check_recovery(seconds, lost, record_property)


def test_one_killed_rank_restarts_the_whole_job(
    supervised: Supervised, undisturbed: list[float]
) -> None:
    supervised.cluster.kill(supervised.cluster.ranks("node1")[:1])
    done = supervised.job.wait(TEST_SECONDS)
    assert done.returncode == 0, done
    causes = [start["cause"] for start in supervised.starts()]
    assert causes[:2] == ["launch", "failure"] and causes.count("launch") == 1, done
    assert not (supervised.run / "left_metrics.jsonl").exists(), "a step was done twice"
    supervised.check_curve(undisturbed)


def test_terminated_supervisor_does_not_checkpoint_or_end_with_75(
    supervised: Supervised, undisturbed: list[float]
) -> None:
    os.kill(supervised.supervisor(), signal.SIGTERM)
    stopped = supervised.job.wait(60)
    assert stopped.returncode == 75, stopped
    last = supervised.lines()[-1]["step"]
    done = supervised.start().wait(TEST_SECONDS)
    assert done.returncode == 0, done
    assert supervised.starts()[-1]["step"] == last, "steps were lost"
    supervised.check_curve(undisturbed)
