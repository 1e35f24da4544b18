"""Exchange of a model that spans ranks: each rank sums its shard with the shard's replicas."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from hvdtrain import comm
from hvdtrain.exchange.base import Exchange, TrainedParameters, buckets
from hvdtrain.runtime.collectives import gather_json, lost_ranks, set_of_shard
from hvdtrain.runtime.horovod import hvd
from hvdtrain.runtime.mesh import Mesh
from hvdtrain.runtime.tensor_shards import local


class SpanningExchange(Exchange):
    """See Exchange. Gradients are summed after the last backward pass.

    First over the ranks that split matrices between them, for the parameters that each of these
    ranks holds completely, then over the ranks that split sequences (both with torch.distributed),
    if there are any, then over the replicas (Horovod). Along `shard` FSDP has already summed the
    gradients, and along `pipeline` each rank has complete gradients of its stages.

    Args:
        optimizer: over this rank's shard of the parameters.
        model: gives the parameters their names.
        mesh: mesh of this generation; an elastic run builds the exchange again in the next one.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, mesh: Mesh) -> None:
        super().__init__(TrainedParameters(optimizer, model))
        self._replicas = mesh.grid.replicas
        self._same_shard = set_of_shard(mesh.grid, mesh.topology.rank)
        self._context = mesh.ranks_along("context")
        self._buckets = buckets(self.parameters)
        everywhere = gather_json(self.trained.all_names, "shards.names")
        self.trained.all_names = [*dict.fromkeys(name for names in everywhere for name in names)]
        self._bytes = sum(local(p).numel() * p.element_size() for p in self.parameters)

    def reduce(self) -> None:
        for bucket in self._buckets:
            complete_gradients(bucket)
        gradients = [[_own_gradient(p) for p in bucket] for bucket in self._buckets]
        if self._context is not None:
            with comm.COLLECTIVES.waiting("context"):
                self._sum_over_context(gradients)
        if self._replicas > 1:
            began = time.perf_counter()
            with lost_ranks():
                self._sum_over_replicas(gradients)
            self.inflight_seconds += time.perf_counter() - began
            self.bytes += self._bytes

    def _sum_over_context(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        for bucket in gradients:
            row = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(row, group=self._context)
            parts = row.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def _sum_over_replicas(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        handles = [
            hvd.grouped_allreduce_async_(
                [*bucket], op=hvd.Sum, name=f"shards.{number}", process_set=self._same_shard
            )
            for number, bucket in enumerate(gradients)
        ]
        for handle in handles:
            hvd.synchronize(handle)


def complete_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum, in one message, the gradients that are partial sums on the ranks of a split model.

    apply_tensor has split the model; all ranks that hold it call this function.

    Args:
        parameters: parameters of one dtype, in the same order on all ranks.
    """
    spread = [(p, p.grad) for p in parameters if isinstance(p.grad, DTensor) and _is_spread(p.grad)]
    if not spread:
        return
    mesh = spread[0][1].device_mesh
    row = torch.cat([local(gradient).reshape(-1) for _, gradient in spread])
    with comm.COLLECTIVES.waiting("tensor"):
        dist.all_reduce(row, group=mesh.get_group())
    parts = row.split([gradient.numel() for _, gradient in spread])
    for (parameter, gradient), part in zip(spread, parts, strict=True):
        whole = part.view(gradient.shape)
        parameter.grad = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)


def _is_spread(gradient: DTensor) -> bool:
    return any(placement.is_partial() for placement in gradient.placements)


def _own_gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of the gradient; zeros if no backward pass reached the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)
