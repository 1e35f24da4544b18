"""All-reduce through the memory that the ranks of a host share: patch 0027."""

from __future__ import annotations

from hvdtrain.runtime.mesh import Topology
from tests.support import shared_sums


def test_ranks_of_a_host_share_memory_without_descriptors(topology: Topology) -> None:
    assert bool(shared_sums.mappings()) == (topology.local_size > 1)
    assert not shared_sums.descriptors()


def test_sums_are_added_in_the_order_of_the_ranks(topology: Topology) -> None:
    shared_sums.check_all_sizes(topology.rank, topology.world_size)


def test_many_small_tensors_at_once(topology: Topology) -> None:
    shared_sums.check_many(topology.rank, topology.world_size)
