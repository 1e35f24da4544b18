"""Sharded parameters, gradients and optimizer state inside a replica: torch's FSDP2.

ZeRO-3 (arXiv:1910.02054), or ZeRO-2 where parameters stay whole from forward to backward.
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
# they move, `parallel.shard` fails at import; if FSDP calls them otherwise, waits along `shard` are
# not counted. tests/single/test_torch_private_ranks.py notices.
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
        precision: dtypes of what is computed and of what is summed
        offload: whether parameters, gradients and optimizer state stay on the CPU
        in_order: a forward pass uses all blocks, one after the other: on CPUs the next one is
            gathered while one computes, into one buffer (on GPUs torch does so anyway)
    """

    reshard_after_forward: bool = True
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    in_order: bool = True


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
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
        if mesh.device_type == "cpu":  # a GPU waits by itself
            module.set_custom_all_gather(_TimedAllGather())
            module.set_custom_reduce_scatter(_TimedReduceScatter())
    if mesh.device_type == "cpu":
        # Private, without a public equivalent: the gather of the next block overlaps with the
        # current one. If it goes, `parallel.shard` fails on CPUs.
        model._set_unshard_async_op(True)  # type: ignore[operator]
        for block, following in pairwise(blocks if sharding.in_order else ()):
            block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    model.register_forward_hook(_reshard_without_backward)


def _reshard_without_backward(model: nn.Module, inputs: Any, output: Any) -> None:
    """What stays whole from forward to backward would stay so, where there is no backward."""
    if torch.is_grad_enabled():
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class _TimedAllGather(DefaultAllGather):
    """What is waited for it counts as waited along `shard`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        with comm.OWN.waiting("shard"):
            work = super().__call__(*args, **kwargs)
        return None if work is None else _TimedWork(work)


class _TimedWork(dist.Work):
    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with comm.OWN.waiting("shard"):
            return self._work.wait(timeout)


class _TimedReduceScatter(DefaultReduceScatter):
    """As above."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Work; or None, from torch 2.14
        with comm.OWN.waiting("shard"):
            return super().__call__(*args, **kwargs)
