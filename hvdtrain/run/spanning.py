"""Models that span ranks: the mesh of replicas, and sharding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # private, see tasks/sync_batchnorm.py
from torch.optim import Optimizer

from hvdtrain.config import Config
from hvdtrain.engine.step import norm_of_gradients
from hvdtrain.errors import UserError
from hvdtrain.optim.ema import Ema
from hvdtrain.parallel.config import ParallelConfig
from hvdtrain.runtime.mesh import Grid, Mesh, Topology
from hvdtrain.runtime.state_part import ShardedPart
from hvdtrain.tasks import Task, optional
from hvdtrain.tasks.blocks import blocks_of

if TYPE_CHECKING:
    from hvdtrain.parallel.cut import CutModel


def form_mesh(
    config: ParallelConfig,
    topology: Topology,
    device: torch.device,
    grid: Grid | None = None,
) -> Mesh:
    """Assign shards of the model to ranks; every rank calls it.

    The ranks of each replica form a torch.distributed world of their own.

    Args:
        grid: assignment of shards to ranks; default: in the order of the ranks.

    Raises:
        UserError: the ranks do not form a whole number of replicas.
    """
    grid = grid or Grid.of(topology.hosts, config.degrees, config.place)
    if not config.spans_ranks:
        return Mesh(topology, grid)
    from torch.distributed.device_mesh import init_device_mesh

    from hvdtrain.parallel.world import join

    join(grid.replica_of(topology.rank), topology, device)
    used = {axis: degree for axis, degree in grid.degrees.items() if degree > 1}
    model = init_device_mesh(device.type, (*used.values(),), mesh_dim_names=(*used,))
    return Mesh(topology, grid, model)


def leave_mesh() -> None:
    """Leave the torch.distributed world after the last step, on every rank."""
    from hvdtrain.parallel.world import leave

    leave()


def split_model(
    config: Config, task: Task, model: nn.Module, mesh: Mesh, elastic: bool
) -> CutModel | None:
    """Reduce the model to this rank's shard of each matrix and its stages, before compilation.

    Args:
        elastic: processes may join and leave.

    Returns:
        The stages; None: the rank has all of them.

    Raises:
        UserError: the model does not define its split, its sizes are not divisible, or it cannot
            span ranks.
    """
    if mesh.model is None:
        return None
    if optional(task, "measures"):
        raise UserError(
            f"task {config.task}: its measures() take a row for each sample from ranks that hold "
            "the whole model: leave the degrees of `parallel` at 1"
        )
    parallel, of_task = config.parallel, f"the model of task {config.task}"
    if elastic and any(isinstance(module, _NormBase) for module in model.modules()):
        raise UserError(
            f"{of_task} has BatchNorm, and spans ranks of an elastic run: after a failure its "
            "statistics could be those of another step than its weights; use LayerNorm or GroupNorm"
        )
    if parallel.tensor > 1:
        from hvdtrain.parallel.tensor import apply_tensor

        plan = getattr(model, "tensor_plan", None)
        if plan is None:
            raise UserError(
                f"parallel.tensor {parallel.tensor}: {of_task} does not say how it is split: give "
                "it a method tensor_plan() (docs/custom-tasks.md#how-ranks-split-a-model)"
            )
        apply_tensor(model, mesh.model["tensor"], plan())
    if parallel.context > 1:
        from hvdtrain.models.gpt import GPT
        from hvdtrain.parallel.context import apply_context

        if not isinstance(model, GPT):
            raise UserError(
                f"parallel.context {parallel.context}: {of_task} is no GPT, the one model whose "
                "attention reaches over ranks"
            )
        apply_context(model, mesh.model.get_group("context"))
    if parallel.pipeline == 1:
        return None
    from hvdtrain.parallel.cut import CutModel
    from hvdtrain.parallel.schedules import virtual_stages
    from hvdtrain.parallel.stages import Layout

    if any(isinstance(module, _NormBase) for module in model.modules()):
        raise UserError(
            f"parallel.pipeline {parallel.pipeline}: {of_task} has BatchNorm, whose statistics "
            "would be those of one stage: use LayerNorm or GroupNorm"
        )
    layout = Layout(parallel.pipeline, virtual_stages(parallel.schedule))
    return CutModel(task, model, layout, mesh.coordinates["pipeline"])


def shard_model(
    config: Config, task: Task, model: nn.Module, mesh: Mesh, cut: CutModel | None
) -> None:
    """Shard each parameter over ranks, after all other changes to the model.

    Args:
        cut: this rank's stages; blocks of other stages are no longer in the model.

    Raises:
        UserError: the model has no blocks, or there is no device to offload from.
    """
    parallel = config.parallel
    if mesh.model is None or parallel.shard == 1:
        return
    offloads, device = parallel.offload == "cpu", mesh.model.device_type
    if offloads and device == "cpu":
        raise UserError(
            "parallel.offload cpu: this rank computes on the CPU, in whose memory parameters lie "
            "already: it is for GPUs"
        )
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    from hvdtrain.parallel.shard import Sharding, apply_shard

    blocks = blocks_of(task, model)
    if not blocks:
        raise UserError(
            f"parallel.shard {parallel.shard}: the model of task {config.task} has no "
            "nn.ModuleList of blocks, one of which at a time is whole on a rank: name them with "
            "the task's blocks(model)"
        )
    offload = CPUOffloadPolicy() if offloads else OffloadPolicy()
    sharding = Sharding(parallel.reshard_after_forward, offload=offload, in_order=cut is None)
    apply_shard(model, blocks, mesh.model["shard"], sharding)
    if cut is not None:
        cut.leave_after_hooks()


def build_norm(
    mesh: Mesh, device: torch.device, cut: CutModel | None
) -> Callable[[Sequence[Tensor]], Tensor]:
    """Build the function that computes the gradient norm over all shards of the model."""
    if mesh.model is None:
        return norm_of_gradients
    from hvdtrain.parallel.norm import total_norm
    from hvdtrain.parallel.pieces import holders, holders_mesh

    same_layers = holders_mesh(mesh.model)
    tied = set(cut.tied.values()) if cut else set()  # both ends have the whole gradient

    @cache
    def copies(parameter: Tensor) -> int:
        own = holders(parameter, same_layers) if same_layers else 1
        return 2 * own if parameter in tied else own

    return partial(total_norm, holders=copies, group=None, device=device)


def spanned_parts(
    mesh: Mesh, model: nn.Module, optimizer: Optimizer, cut: CutModel | None, ema: Ema | None
) -> Sequence[ShardedPart]:
    """Return the state parts of a model that spans ranks: model, optimizer, EMA; else nothing."""
    if mesh.model is None:
        return ()
    from hvdtrain.parallel.spanned_state import Saves, SpannedEma, SpannedModel, SpannedOptimizer

    twice = set(cut.tied) if cut and cut.rank > 0 else set[str]()
    saves = Saves(mesh, twice)
    parts = SpannedModel(model, saves), SpannedOptimizer(optimizer, model, saves)
    return (*parts, SpannedEma(ema, model, saves)) if ema else parts
