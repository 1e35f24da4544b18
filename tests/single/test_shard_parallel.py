"""A model whose parameters are sharded, alone and after tensor parallelism split it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from hvdtrain.parallel.shard import Sharding
from tests.support.split_models import Variant, compared
from tests.support.torch_ranks import on_torch_ranks

SHARDED = {
    "zero 3": Variant({"dropout": 0.2}),
    "zero 2": Variant({"norm": "rms"}, sharding=Sharding(reshard_after_forward=False)),
    "offloaded": Variant({}, sharding=Sharding(offload=CPUOffloadPolicy(pin_memory=False))),
    "sums of 16 bits": Variant(
        {}, sharding=Sharding(precision=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    ),
}
BOTH = {
    "Llama": Variant({"kv_heads": 2, "norm": "rms", "bias": False, "tied_embeddings": False}),
    "learned positions, dropout": Variant({"positions": "learned", "dropout": 0.2}),
}


def test_two_ranks_that_shard_a_model_train_otherwise_than_one_or_hold_more_than_half() -> None:
    """Two micro-batches a rank: gradients are sums over ranks and over backward passes."""
    for rank in on_torch_ranks(2, compared, {"shard": 2}, SHARDED, timeout=240):
        rough = rank.pop("sums of 16 bits")
        assert 1e-5 < rough.gradient < 0.1, "the policy was not used"
        for name, found in rank.items():
            assert found.loss < 1e-5 and found.gradient < 1e-5, name
            assert found.fraction == pytest.approx(0.5, rel=0.05), name


def test_four_ranks_that_split_and_shard_a_model_train_otherwise_than_one() -> None:
    for rank in on_torch_ranks(4, compared, {"shard": 2, "tensor": 2}, BOTH, timeout=240):
        for name, found in rank.items():
            assert found.loss < 1e-5 and found.gradient < 1e-5, name
            assert not found.copies, name
            assert found.fraction == pytest.approx(0.25, abs=0.03), name
