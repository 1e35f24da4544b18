"""A GPT split over ranks by torch only, as in torch's tutorials: the reference for hvdtrain.

These scripts have no checkpoints, no metrics and no other layouts, and do not import Horovod.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from hvdtrain.models.gpt import GPT
from hvdtrain.parallel.cut import CutModel
from hvdtrain.parallel.schedules import Layout
from hvdtrain.tasks import Task


@dataclass(frozen=True)
class Script:
    """One rank's share of a step.

    Args:
        parameters: this rank's parameters.
        backward: (micro-batches) -> their mean loss, as far as this rank knows it; gradients are
            then the gradients of the mean over all ranks' micro-batches.
        clip: clips these gradients to a norm.
    """

    parameters: Sequence[nn.Parameter]
    backward: Callable[[Sequence[Tensor]], Tensor]
    clip: Callable[[float], Any]


def shard(task: Task, model: GPT, mesh: DeviceMesh) -> Script:
    """FSDP2, block by block; each rank has its own micro-batches."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo does not support averaging

    def backward(batches: Sequence[Tensor]) -> Tensor:
        total = torch.zeros(())
        for batch in batches:
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss = loss / len(batches)
            loss.backward()
            total += loss.detach()
        return total

    return _whole_steps(model, backward)


def tensor(task: Task, model: GPT, mesh: DeviceMesh) -> Script:
    """DTensor, with norms and the residual stream split by sequence and the loss by vocabulary."""
    whole = PrepareModuleOutput(
        output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
    )
    ends: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
    }
    if model.head is not None:
        ends["head"] = ColwiseParallel()
    parallelize_module(model, mesh, ends, src_data_rank=None)
    parallelize_module(model.norm, mesh, whole)
    gathered = PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": gathered}
    plan |= {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("up", "gate")}
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "down")}
    for block in model.blocks:
        here = {name: style for name, style in plan.items() if name != "gate" or block.gate}
        parallelize_module(block, mesh, here, src_data_rank=None)

    def backward(batches: Sequence[Tensor]) -> Tensor:
        total = torch.zeros(())
        for batch in batches:
            with loss_parallel():
                logits = model(batch[:, :-1])
                mean: Any = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                loss = mean / len(batches)
                loss.backward()
            total += loss.detach().to_local()
        return total

    return _whole_steps(model, backward)


class _Stage(nn.Module):
    def __init__(self, model: GPT, blocks: range, ends: tuple[bool, bool]) -> None:
        super().__init__()
        first, last = ends
        self.embedding = model.embedding if first else None
        self.blocks = nn.ModuleList(model.blocks[number] for number in blocks)
        self.norm = model.norm if last else None
        self.head = model.head if last else None
        self.rotary = model.cos, model.sin

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, self.rotary, None)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def pipeline(task: Task, model: GPT, mesh: DeviceMesh) -> Script:
    """1F1B, with hvdtrain's stages; the embedding is not tied."""
    rank, ranks, group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
    spans = CutModel(task, task.model(), Layout(ranks), rank).spans
    module = _Stage(model, spans[rank], (rank == 0, rank == ranks - 1))
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"), group=group)
    schedules: dict[int, Schedule1F1B] = {}

    def backward(batches: Sequence[Tensor]) -> Tensor:
        number = len(batches)
        if number not in schedules:
            schedules[number] = Schedule1F1B(stage, number, loss_fn=_loss)
        whole, losses = torch.cat([*batches]), list[Tensor]()
        if rank == 0:
            schedules[number].step(whole[:, :-1])
        elif rank == ranks - 1:
            schedules[number].step(target=whole[:, 1:], losses=losses)
        else:
            schedules[number].step()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    parameters = [*module.parameters()]

    def clip(most: float) -> None:
        squares = get_total_norm([p.grad for p in parameters if p.grad is not None]).square()
        dist.all_reduce(squares, group=group)
        clip_grads_with_norm_(parameters, most, squares.sqrt())

    return Script(parameters, backward, clip)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _whole_steps(model: GPT, backward: Callable[[Sequence[Tensor]], Tensor]) -> Script:
    parameters = [*model.parameters()]
    return Script(parameters, backward, lambda most: clip_grad_norm_(parameters, most))


SCRIPTS: dict[str, Callable[[Task, GPT, DeviceMesh], Script]] = {
    "shard": shard,
    "tensor": tensor,
    "pipeline": pipeline,
}
