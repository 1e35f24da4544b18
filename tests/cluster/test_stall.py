"""A rank that takes no part in a collective, under Horovod's own Gloo launcher."""

from __future__ import annotations

import re

import pytest

from tests.support.cluster import Cluster


@pytest.mark.alone
def test_rank_missing_from_a_collective_is_reported_under_gloo(cluster: Cluster) -> None:
    seconds = {"CHECK": "1", "SHUTDOWN": "3"}
    env = {f"HOROVOD_STALL_{name}_TIME_SECONDS": value for name, value in seconds.items()}
    command = f"horovodrun --gloo -np 2 {cluster.python} -m tests.support.held_collective".split()
    done = cluster.run("node1", command, env, timeout=30)
    assert done.returncode != 0 and "rank 1 was never missed" not in done.stderr, done
    # "!" marks the rank that ends the job.
    assert re.search(r"Missing ranks:\n\S*1!?: \[[^]]*alone", done.stderr), done
    assert done.seconds < 20, done
