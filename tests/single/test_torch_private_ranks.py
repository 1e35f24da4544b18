"""Private parts of torch's parallel libraries that hvdtrain relies on, between two ranks."""

from __future__ import annotations

from tests.support.timed_waits import count_waits
from tests.support.torch_ranks import on_torch_ranks


def test_waits_of_fsdp_and_of_dtensor_pass_through_hvdtrain() -> None:
    for found in on_torch_ranks(2, count_waits):
        # At least a gather and a gradient sum for each of two blocks.
        assert found["shard, forward"] >= 2 and found["shard, backward"] >= 2, found
        assert found["tensor"] >= 1, found
