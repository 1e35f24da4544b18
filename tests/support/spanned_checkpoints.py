"""A model on many layouts of one world's ranks; each layout saves what the others read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW

from hvdtrain.checkpoint.format import read, write, write_own_files
from hvdtrain.config import Config
from hvdtrain.engine.loop import Progress
from hvdtrain.engine.state import RunState
from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.optim.ema import Ema
from hvdtrain.optim.optimizer import state_tensors
from hvdtrain.parallel.config import AXES, ParallelConfig, ShardConfig
from hvdtrain.parallel.local_optimizer import LocalOptimizer
from hvdtrain.parallel.spanned import position
from hvdtrain.process.strategy import Replicated, Spanning, Strategy
from hvdtrain.runtime.mesh import Grid, Group, Mesh, Topology
from hvdtrain.runtime.tensor_shards import box, local, model_tensors

# The vocabulary is odd, so that its shards have different sizes.
SIZES = GPTConfig(layers=2, heads=4, width=16, context=16, vocab_size=37)
Degrees = Mapping[str, int]


def _state(degrees: Degrees) -> RunState:
    """Return the state after steps of AdamW, with gradients that depend only on the parameters."""
    rank, size = dist.get_rank(), dist.get_world_size()
    others = {axis: degree for axis, degree in degrees.items() if axis != "shard"}
    parallel = ParallelConfig(**others, shard=ShardConfig(degrees.get("shard", 1)))
    grid = Grid.of(["host"] * size, parallel.degrees, AXES)
    used = {axis: degree for axis, degree in grid.degrees.items() if degree > 1}
    replicas = {"data": grid.replicas} if grid.replicas > 1 else {}
    everywhere = {**replicas, **used}
    ranks = init_device_mesh("cpu", (*everywhere.values(),), mesh_dim_names=(*everywhere,))
    model_axes = ranks[tuple(used)] if used else None
    mesh = Mesh(Topology(rank, size, rank, size, ("host",) * size), grid, model_axes)
    config, task = Config(parallel=parallel), object()
    torch.manual_seed(1)
    model: nn.Module = GPT(SIZES)
    strategy: Strategy = Replicated(config, elastic=False)
    if used:
        strategy = Spanning(config, elastic=False)
        strategy.use(mesh)
    strategy.split(task, model)  # type: ignore[arg-type]
    strategy.shard(task, model)  # type: ignore[arg-type]
    inner = AdamW(model.parameters(), lr=0.01, foreach=False)
    optimizer = LocalOptimizer(inner) if used else inner
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    ema = Ema(optimizer, model, 0.5)
    optimizer.step()
    optimizer.step()
    more, spanned = strategy.state_parts(model, optimizer, ema)
    return RunState(model, optimizer, Progress(step=1), {}, more, spanned)


def _save(state: RunState, root: Path) -> Path:
    rank, hidden = dist.get_rank(), ".step_00000001.here.1.0.tmp"
    captured = state.capture(Group(rank, dist.get_world_size()), hidden)
    directory = [root / "step_00000001"]
    if rank == 0:
        directory = [write(root, captured)]
    elif captured.parts:
        write_own_files(root, captured)
    dist.barrier()
    return directory[0]


def _wrong(state: RunState, whole: Mapping[str, Tensor]) -> list[str]:
    """Return the names of this rank's tensors that are not shards of `whole`."""
    wrong = []
    for name, tensor in model_tensors(state.model).items():
        where, part = position(tensor), local(tensor)
        if not torch.equal(whole[name][box(where, part)], part):
            wrong.append(name)
    for name, entry in state_tensors(state.optimizer, state.model).items():
        parameter = state.model.get_parameter(name.rpartition("/")[0])
        where = position(parameter if entry.dim() else entry)
        if not torch.equal(whole[name][box(where, entry)], entry):
            wrong.append(name)
    for name, average in state.parts[2].compared().items():
        where = position(state.model.get_parameter(name))
        if not torch.equal(whole[f"ema/{name}"][box(where, average)], average):
            wrong.append(f"ema/{name}")
    return wrong


def _whole(state: RunState) -> dict[str, Tensor]:
    averages = {f"ema/{name}": t for name, t in state.parts[2].tensors().items()}
    optimizer = state_tensors(state.optimizer, state.model)
    return {**model_tensors(state.model), **optimizer, **averages}


def _scramble(state: RunState) -> None:
    """Overwrite all tensors; an optimizer or an average keeps its entries."""
    with torch.no_grad():
        for tensor in (*model_tensors(state.model).values(), *state.parts[2].compared().values()):
            local(tensor).add_(1.0)
        for tensor in state_tensors(state.optimizer, state.model).values():
            local(tensor).add_(1.0)


def read_by_others(root: Path, layouts: Mapping[str, Degrees]) -> dict[str, list[str]]:
    """Return (writer, reader) -> names of tensors on this rank that differ from what was saved."""
    whole = {name: tensor.clone() for name, tensor in _whole(_state({})).items()}
    states = {name: _state(degrees) for name, degrees in layouts.items()}
    directories = {name: _save(state, root / name) for name, state in states.items()}
    found = {}
    for reader, state in states.items():
        for writer, directory in directories.items():
            _scramble(state)
            assert _wrong(state, whole)
            if state.spanned:
                state.read_shards(directory)
            else:
                state.load(read(directory))
            found[f"{writer} -> {reader}"] = _wrong(state, whole)
    return found
