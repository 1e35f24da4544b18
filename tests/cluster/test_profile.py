"""Profiles of an elastic run: a generation that ends within the range closes its files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hvdtrain.telemetry.profile_summary import summarize
from tests.support.cluster import Cluster
from tests.support.faults import ElasticJob


@pytest.mark.soak
def test_killed_rank_does_not_lose_the_profiles_of_other_ranks(
    cluster: Cluster, runs: Path
) -> None:
    flags = "--profile.steps 10:40 --profile.ranks [0,1]"
    job = ElasticJob(cluster, runs, "node1:2 node2:1", np=3, arguments=flags)
    try:
        job.wait_for_step(20)
        job.kill(0)  # it writes Horovod's timeline
        job.wait_for_start(time.time(), 30)
        job.wait_for_step(45)
        job.end()
    finally:
        job.job.kill()
    parts = summarize(job.run)
    # Every finished step is in one section, and each section records when each rank was ready.
    spans = [part.steps for part in parts]
    assert spans[0][0] == 10 and spans[-1][1] == 40 and len(spans) > 1, spans
    assert [end for _, end in spans[:-1]] == [first for first, _ in spans[1:]], spans
    for part in parts[1:]:
        assert {rank.profile.rank for rank in part.ranks} == {0, 1}, part
        assert {one.rank for one in part.lateness} >= {0, 1} and not part.problems, part
    assert {rank.profile.rank for rank in parts[0].ranks} == {1}  # the other process was killed
