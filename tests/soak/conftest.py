"""The two hosts of the cluster tests."""

from tests.cluster.conftest import cluster, runs, two_hosts

__all__ = ["cluster", "runs", "two_hosts"]
