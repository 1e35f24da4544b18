"""Sharded parameters, gradients and optimizer state inside a replica: torch's FSDP2.

ZeRO-3 (arXiv:1910.02054), or ZeRO-2 where parameters stay whole from forward to backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded.

    Args:
        reshard_after_forward: a block's parameters are gathered again for its backward pass
            (ZeRO-3); False: they stay whole in between (ZeRO-2)
        precision: dtypes of what is computed and of what is summed
        offload: whether parameters, gradients and optimizer state stay on the CPU
    """

    reshard_after_forward: bool = True
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)


def apply_shard(
    model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, sharding: Sharding
) -> None:
    """Shards `model` in place over the ranks of `mesh`, block by block.

    Nothing is exchanged: each rank keeps its parts of the model that stands with the same bits on
    all of them. Parameters and gradients become DTensors, sharded along their first dimension; a
    model that `apply_tensor` has split is sharded further, of which the two meshes are dimensions
    of one. Gradients are summed over the ranks, not averaged, and over backward passes. Every rank
    has to make as many forward and as many backward passes as the others, in the same order. A
    forward pass is a call of `model`, not of another of its methods; after one without gradients
    nothing stays whole.

    Args:
        blocks: modules of `model` that are gathered one at a time; what lies in none of them is
            gathered with the model itself.
        mesh: of one dimension.
    """
    for block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=sharding.reshard_after_forward,
            mp_policy=sharding.precision,
            offload_policy=sharding.offload,
        )
    # The model's own parameters are needed at once for the backward pass: torch keeps them whole.
    fully_shard(model, mesh=mesh, mp_policy=sharding.precision, offload_policy=sharding.offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
    model.register_forward_hook(_reshard_without_backward)


def _reshard_without_backward(model: nn.Module, inputs: Any, output: Any) -> None:
    """What stays whole from forward to backward would stay so, where there is no backward."""
    if torch.is_grad_enabled():
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
