"""Sharded parameters, alone and combined with tensor parallelism."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from hvdtrain.config import parse
from hvdtrain.errors import UserError
from hvdtrain.parallel.fsdp import Sharding
from hvdtrain.process.strategy import Spanning
from tests.support.split_models import Variant, compared, whole_blocks
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


def test_two_sharded_ranks_match_one_rank_and_hold_half_each() -> None:
    """Two micro-batches per rank: gradients are sums over ranks and over backward passes."""
    for rank in on_torch_ranks(2, compared, {"shard": 2}, SHARDED, timeout=240):
        rough = rank.pop("sums of 16 bits")
        assert 1e-5 < rough.gradient < 0.1, "the policy was not used"
        for name, found in rank.items():
            assert found.loss < 1e-5 and found.gradient < 1e-5, name
            assert found.fraction == pytest.approx(0.5, rel=0.05), name
            assert not found.dtensors, name


def test_zero_3_gathers_one_block_at_a_time_and_zero_2_gathers_once() -> None:
    kinds = {"zero 3": Sharding(), "zero 2": Sharding(reshard_after_forward=False)}
    for rank in on_torch_ranks(2, whole_blocks, kinds):
        for number in range(3):
            assert rank["zero 3"][f"forward {number}"] == [number]
            assert rank["zero 3"][f"backward {number}"] == [number]
            assert rank["zero 2"][f"forward {number}"] == [*range(number + 1)]
            assert rank["zero 2"][f"backward {number}"] == [*range(number + 1)]
        assert rank["zero 3"]["between"] == [] and rank["zero 2"]["between"] == [0, 1, 2]
        assert rank["zero 3"]["after evaluation"] == rank["zero 2"]["after evaluation"] == []


def test_offload_without_a_gpu_is_refused() -> None:
    config = parse(["--parallel.shard.degree=2", "--parallel.shard.offload=cpu"]).config
    task: Any = SimpleNamespace()
    strategy = Spanning(config, elastic=False)
    strategy.use(cast(Any, SimpleNamespace(axes=SimpleNamespace(device_type="cpu"))))
    with pytest.raises(UserError, match="it is for GPUs"):
        strategy.shard(task, torch.nn.Linear(1, 1))


def test_tensor_parallel_and_sharded_ranks_match_one_rank() -> None:
    for rank in on_torch_ranks(4, compared, {"shard": 2, "tensor": 2}, BOTH, timeout=240):
        for name, found in rank.items():
            assert found.loss < 1e-5 and found.gradient < 1e-5, name
            assert not found.copies, name
            assert found.fraction == pytest.approx(0.25, abs=0.03), name
