"""Sharded parameters, gradients and optimizer state inside a replica: torch's FSDP2.

ZeRO-3 (arXiv:1910.02054), or ZeRO-2 if parameters stay whole from forward to backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

# Private: FSDPModule.set_custom_all_gather is public, the defaults that it replaces are not. If
# they move, sharding fails at import; if FSDP calls them differently, waits along `shard`
# are not counted. tests/single/test_torch_private_ranks.py detects it.
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from hvdtrain import comm


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded.

    Args:
        reshard_after_forward: a block's parameters are gathered again for its backward pass
            (ZeRO-3); False: they stay whole in between (ZeRO-2)
        precision: dtypes of computation and of reduction
        offload: whether parameters, gradients and optimizer state stay on the CPU
        in_order: a forward pass uses all blocks, one after another: on CPUs the next block is
            gathered while the current one computes, into one buffer (on GPUs torch does so anyway)
    """

    reshard_after_forward: bool = True
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    in_order: bool = True


def apply_shard(
    model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, sharding: Sharding
) -> None:
    """Shard `model` in place over the ranks of `mesh`, block by block.

    Nothing is exchanged: each rank keeps its shards of the model, which must be bitwise identical
    on all ranks. Parameters and gradients become DTensors, sharded along their first dimension. A
    model that `apply_tensor` has split is sharded further; the two meshes must be dimensions of one
    mesh. Gradients are summed over the ranks, not averaged, and over backward passes. Every rank
    must make the same number of forward and backward passes as the others, in the same order. A
    forward pass is a call of `model`, not of another of its methods; after a forward pass without
    gradients no parameters stay whole.

    Args:
        blocks: modules of `model` that are gathered one at a time; parameters outside of them are
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
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        if mesh.device_type == "cpu":  # a GPU waits asynchronously
            module.set_custom_all_gather(_TimedAllGather())
            module.set_custom_reduce_scatter(_TimedReduceScatter())
    if mesh.device_type == "cpu":
        # Private, without a public equivalent: the gather of the next block overlaps with the
        # current one. If torch removes it, sharding fails on CPUs.
        model._set_unshard_async_op(True)  # type: ignore[operator]
        for block, following in pairwise(blocks if sharding.in_order else ()):
            block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    model.register_forward_hook(_reshard_without_backward)


def _reshard_without_backward(model: nn.Module, inputs: Any, output: Any) -> None:
    """Reshard parameters that would stay whole until backward, if there is no backward."""
    if torch.is_grad_enabled():
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class _TimedAllGather(DefaultAllGather):
    """All-gather whose wait counts as waiting along `shard`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        with comm.COLLECTIVES.waiting("shard"):
            work = super().__call__(*args, **kwargs)
        return None if work is None else _TimedWork(work)


class _TimedWork(dist.Work):
    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with comm.COLLECTIVES.waiting("shard"):
            return self._work.wait(timeout)


class _TimedReduceScatter(DefaultReduceScatter):
    """Reduce-scatter whose wait counts as waiting along `shard`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Work; or None, from torch 2.14
        with comm.COLLECTIVES.waiting("shard"):
            return super().__call__(*args, **kwargs)
