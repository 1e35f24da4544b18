"""The norm of a sharded gradient."""

from __future__ import annotations

import pytest
import torch

from tests.support.split_models import norms
from tests.support.torch_ranks import on_torch_ranks


def test_norm_of_shards_equals_the_whole_norm_on_every_rank() -> None:
    """Shards that one rank, two or all four hold, an empty one, 16 bits, and none on a rank."""
    found = on_torch_ranks(4, norms, timeout=240)
    for name, (value, expected) in found[0].items():
        assert value == pytest.approx(expected, rel=1e-6), name
        assert all(rank[name][0] == value for rank in found), name
    assert torch.tensor([e for _, e in found[0].values()]).gt(0).all()
