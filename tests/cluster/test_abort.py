"""hvd.abort(), which patch 0011 adds, fails a pending collective at once."""

from __future__ import annotations

import re

import pytest

from tests.support.cluster import Cluster


@pytest.mark.alone
def test_abort_fails_a_partial_exchange_before_the_timeout(cluster: Cluster) -> None:
    command = f"horovodrun --gloo -np 2 {cluster.python} -m tests.support.aborted"
    done = cluster.run("node1", command.split(), {"HOROVOD_GLOO_TIMEOUT_SECONDS": "20"}, timeout=90)
    (seconds,) = re.findall(r"failed after ([\d.]+) s", done.stdout)
    assert 1.0 <= float(seconds) <= 2.0, done
