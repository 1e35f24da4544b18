"""A lock on the run directory that outlives rank 0, like the 90 s lease of an NFS server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.disturbed import BorrowedLocks
from tests.support.faults import ElasticJob, assert_same_curve, pause
from tests.support.supervised import Supervised

LENDS = "--task tests.support.disturbed:LendsLock"


@pytest.fixture
def locks(cluster: Cluster) -> Iterator[BorrowedLocks]:
    borrowed = BorrowedLocks(cluster.shared)
    yield borrowed
    borrowed.close()


@pytest.mark.alone
def test_survivors_continue_from_memory_while_a_lock_outlives_rank_0(
    job: Callable[..., ElasticJob],
    locks: BorrowedLocks,
    reference: list[dict[str, Any]],
    record_property: Callable[[str, object], None],
) -> None:
    lends = {"HVDTRAIN_TEST_LOCKS": locks.address}
    running = job(hosts="node1:1 node2:1", np=2, arguments=LENDS, env=lends)
    running.wait_for_step(20)
    assert len(locks.held) == 1
    since = time.time()
    running.kill(0)
    start = running.wait_for_start(since, 20)
    recovered = pause(running.lines(), since)
    assert (start["source"], start["world_size"]) == ("memory", 1), start
    running.wait_for_more(5, 30)
    done = running.end()
    record_property("seconds", round(recovered, 2))
    assert_same_curve(running.lines(), reference)
    assert recovered <= 3, f"{recovered:.2f} s without a step: {done}"
    assert not (running.run / "left_metrics.jsonl").exists(), "a step was done twice"


@pytest.mark.soak
def test_launch_recovers_while_a_lock_outlives_rank_0(
    cluster: Cluster,
    locks: BorrowedLocks,
    runs: Path,
    record_property: Callable[[str, object], None],
) -> None:
    supervised = Supervised(
        cluster,
        runs,
        options="--hosts node1:1,node2:1",
        task=f"{LENDS} --batch.global_size 4 --batch.micro_size 2",
        env={"HVDTRAIN_TEST_LOCKS": locks.address},
    )
    try:
        supervised.wait_for_step(25)
        assert len(locks.held) == 1
        fault_at = time.time()
        cluster.kill(cluster.ranks())
        seconds, _ = supervised.recovery(fault_at)
        record_property("seconds", round(seconds, 1))
        supervised.wait_for_step(supervised.lines()[-1]["step"] + 5)
        steps = [line["step"] for line in supervised.lines()]
        assert steps == list(range(1, len(steps) + 1))
    finally:
        supervised.job.kill()
