"""State of a model that spans ranks: each rank saves its shards, and any layout can read them.

A tensor that is split is a DTensor: each dimension of its mesh shards one of its dimensions or
replicates it. Shard divides as `torch.chunk` does: shards of ceil(size / ranks), the last ones
smaller or empty.

In an elastic run, shards are sent to the next generation's replicas, see `transfer_shards`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from hvdtrain.checkpoint.spread import SpreadPart, open_part
from hvdtrain.errors import UserError
from hvdtrain.optim.ema import Ema
from hvdtrain.optim.optimizer import parameter_names, set_state_tensors, state_tensors
from hvdtrain.optim.state_dicts import check_no_rest
from hvdtrain.parallel.shards import Transfer
from hvdtrain.runtime.collectives import ProcessSet, broadcast_json, broadcast_tensors, passing_set
from hvdtrain.runtime.mesh import Mesh
from hvdtrain.runtime.state_part import Saved, ShardedPart
from hvdtrain.runtime.tensor_shards import ShardPosition, box, local, model_tensors


class Saves:
    """Which shards this rank saves: in the first replica, as first holder of the shard.

    Args:
        mesh: of the run.
        elsewhere: names of parameters that another stage of the pipeline saves.
    """

    def __init__(self, mesh: Mesh, elsewhere: Container[str] = ()) -> None:
        self._first_replica = mesh.data.rank == 0
        self._same_layers = same_layers_mesh(mesh.axes)
        self._elsewhere = elsewhere

    def has(self, name: str, tensor: Tensor) -> bool:
        """Whether this rank saves its shard of a tensor, or of one that is split in the same way.

        Args:
            name: of the parameter or buffer that it belongs to.
        """
        if not self._first_replica or name in self._elsewhere:
            return False
        return self._same_layers is None or is_first_holder(tensor, self._same_layers)


class SpannedModel(ShardedPart):
    """The sharded part "model": parameters and saved buffers, by the names of the whole model."""

    name = "model"

    def __init__(self, model: nn.Module, saves: Saves) -> None:
        self._model = model
        self._saves = saves

    def saved(self) -> dict[str, Saved]:
        tensors = model_tensors(self._model).items()
        own = {name: tensor for name, tensor in tensors if self._saves.has(name, tensor)}
        return {name: Saved(local(tensor), position(tensor)) for name, tensor in own.items()}

    def compared(self) -> dict[str, Tensor]:
        """Parameters only: a task may keep buffers that differ between ranks."""
        return {name: local(p) for name, p in self._model.named_parameters()}

    def held(self) -> dict[str, Tensor]:
        """Return all shards of this rank, in the same memory."""
        return {name: local(t) for name, t in model_tensors(self._model).items()}

    @torch.no_grad()
    def take(self, held: Mapping[str, Tensor]) -> None:
        """Copy the result of `held` of a rank with the same shard."""
        for name, own in self.held().items():
            own.copy_(held[name])

    def reset(self) -> None:
        """Do nothing: RunState.start_over copies the weights of a fresh model."""

    @torch.no_grad()
    def read(self, directory: Path, step: int) -> None:
        saved, live = _opened(directory, self.name, self._model), model_tensors(self._model)
        for name, tensor in live.items():
            if name not in saved.names() or saved.shape(name) != tensor.shape:
                raise UserError(
                    f"checkpoint {directory} is of another model: it has no {name} of the shape "
                    f"{[*tensor.shape]}; use the configuration it was made with, or another run.id"
                )
            local(tensor).copy_(_own(tensor, saved.whole(name)))


@torch.no_grad()
def take_over(model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Copy from whole tensors into a model of which this rank holds shards.

    Args:
        whole: parameters and saved buffers by name, including tensors of other ranks' shards.
    """
    for name, tensor in model_tensors(model).items():
        local(tensor).copy_(_own(tensor, whole[name]))


class SpannedOptimizer(ShardedPart):
    """The sharded part "optimizer": "parameter name/entry"; empty before the first step.

    An entry is a count, or it is split like its parameter: the optimizer steps on plain tensors,
    see LocalOptimizer, which do not record how they are split.
    """

    name = "optimizer"

    def __init__(self, optimizer: Optimizer, model: nn.Module, saves: Saves) -> None:
        self._optimizer = optimizer
        self._model = model
        self._saves = saves

    def saved(self) -> dict[str, Saved]:
        check_no_rest(self._optimizer, "a model that spans ranks (parallel.*)")
        found, parameters = {}, self._parameters()
        for key, entry in state_tensors(self._optimizer, self._model).items():
            name = key.rpartition("/")[0]
            split = parameters[name] if entry.dim() else entry
            if self._saves.has(name, split):
                found[key] = Saved(entry, position(split))
        return found

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for p, name in parameter_names(self._optimizer, self._model).items()}

    def compared(self) -> dict[str, Tensor]:
        return state_tensors(self._optimizer, self._model)

    def held(self) -> dict[str, Tensor]:
        """As SpannedModel.held; empty before the first step."""
        return state_tensors(self._optimizer, self._model)

    def take(self, held: Mapping[str, Tensor]) -> None:
        """As SpannedModel.take; this optimizer then owns the tensors."""
        set_state_tensors(self._optimizer, self._model, {**held})

    def reset(self) -> None:
        self._optimizer.state.clear()

    @torch.no_grad()
    def read(self, directory: Path, step: int) -> None:
        saved, tensors = _opened(directory, self.name, self._model), {}
        parameters = self._parameters()
        for key in saved.names():
            parameter = parameters.get(key.rpartition("/")[0])
            if parameter is not None:  # else it belongs to another rank's shard
                tensors[key] = _like(parameter, saved.whole(key))
        set_state_tensors(self._optimizer, self._model, tensors)


class SpannedEma(ShardedPart):
    """The sharded part "ema": averages by the names of their parameters."""

    def __init__(self, ema: Ema, model: nn.Module, saves: Saves) -> None:
        self.name = ema.name
        self._ema, self._model, self._saves = ema, model, saves

    def saved(self) -> dict[str, Saved]:
        parameters = self._ema.parameters
        return {
            name: Saved(average, position(parameters[name]))
            for name, average in self._ema.tensors().items()
            if self._saves.has(name, parameters[name])
        }

    def compared(self) -> dict[str, Tensor]:
        return self._ema.tensors()

    def held(self) -> dict[str, Tensor]:
        """As SpannedModel.held; empty before the first step."""
        return self._ema.tensors()

    def take(self, held: Mapping[str, Tensor]) -> None:
        """As SpannedModel.take; this average then owns the tensors."""
        self._ema.load([held] if held else [])

    def reset(self) -> None:
        self._ema.load(())

    @torch.no_grad()
    def read(self, directory: Path, step: int) -> None:
        saved, found = _opened(directory, self.name, self._model), {}
        for name, parameter in self._ema.parameters.items() if saved.names() else ():
            found[name] = _own(parameter, saved.whole(name)).clone()
        self._ema.load([found])


def _opened(directory: Path, part: str, model: nn.Module) -> SpreadPart:
    saved = open_part(directory, part, model)
    if saved is None:
        raise UserError(f"checkpoint {directory} has no {part}")
    return saved


def _own(tensor: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's shard of `whole`, which is split like `tensor`."""
    return whole[box(position(tensor), local(tensor))]


def _like(parameter: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's shard of an optimizer's entry; the whole entry if its shape differs."""
    return (_own(parameter, whole) if whole.shape == parameter.shape else whole).clone()


def position(tensor: Tensor) -> ShardPosition:
    """Return the position of this rank's shard of `tensor`, whose shard is `local(tensor)`.

    A plain tensor is one shard.

    Args:
        tensor: a parameter, buffer, gradient or entry of an optimizer's state; if a DTensor, with
            placements Shard, FSDP2's strided Shard, and Replicate.

    Raises:
        ValueError: this rank is not in the tensor's mesh, or the tensor is still to be summed over
            ranks.
    """
    if not isinstance(tensor, DTensor):
        return ShardPosition((*tensor.shape,), offsets=(0,) * tensor.dim())
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        raise ValueError("this rank is not in the tensor's mesh")
    sizes = tuple(tensor.device_mesh.shape)
    offsets, lengths = extent(tuple(tensor.shape), sizes, tuple(place), tensor.placements)
    own = tuple(local(tensor).shape)
    assert own == lengths, f"{own} is not {lengths}"
    return ShardPosition((*tensor.shape,), offsets=offsets)


def extent(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    place: tuple[int, ...],
    placements: Iterable[Placement],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (offsets, lengths) of the shard of a tensor of `shape` at position `place` in a mesh.

    Args:
        mesh: sizes of its dimensions, each with one of `placements`.

    Raises:
        ValueError: a placement does not determine a shard of the tensor.
    """
    offsets, lengths = [0] * len(shape), list(shape)
    for dim, placement in _in_order(list(placements)):
        along = _sharded_dimension(placement)
        if along is None:
            continue
        chunk = -(-lengths[along] // mesh[dim])
        begin = min(place[dim] * chunk, lengths[along])
        offsets[along] += begin
        lengths[along] = min(chunk, lengths[along] - begin)
    return tuple(offsets), tuple(lengths)


def _in_order(placements: list[Placement]) -> list[tuple[int, Placement]]:
    """(dimension of the mesh, placement) in the order in which the tensor was split.

    Strided shards of FSDP2, which splits what tensor parallelism has split, come after the shards
    that follow them.
    """
    numbered = list(enumerate(placements))
    strided = [pair for pair in numbered if hasattr(pair[1], "split_factor")]
    return [pair for pair in numbered if pair not in strided] + strided[::-1]


def _sharded_dimension(placement: Placement) -> int | None:
    if placement.is_partial():
        raise ValueError("the tensor is yet to be summed over ranks")
    return None if placement.is_replicate() else placement.dim  # type: ignore[attr-defined]


def copies_in_replica(tensor: Tensor, mesh: DeviceMesh) -> int:
    """Number of ranks that hold the same shard of `tensor` as this rank, including this one.

    Args:
        mesh: of the ranks that hold the tensor or shards of it (the ranks of one pipeline stage of
            one replica), with named dimensions; a DTensor's mesh is this or a part of it.
    """
    number = 1
    for size in _sizes_of_copies(tensor, mesh).values():
        number *= size
    return number


def same_layers_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Mesh of the replica's ranks that hold the same layers; None: only this rank."""
    assert mesh.mesh_dim_names is not None
    names = tuple(name for name in mesh.mesh_dim_names if name != "pipeline")
    return mesh[names] if names else None


def is_first_holder(tensor: Tensor, mesh: DeviceMesh) -> bool:
    """Whether this rank is the first of the replica's ranks that hold the same shard."""
    return all(mesh.get_local_rank(name) == 0 for name in _sizes_of_copies(tensor, mesh))


def _sizes_of_copies(tensor: Tensor, mesh: DeviceMesh) -> dict[str, int]:
    """Sizes of the dimensions of `mesh` along which all ranks hold the same shard."""
    names = mesh.mesh_dim_names
    assert names is not None, "the mesh's dimensions have no names"
    split = set()
    if isinstance(tensor, DTensor):
        own = tensor.device_mesh.mesh_dim_names or ()
        assert set(own) <= set(names), f"{own} are not dimensions of {names}"
        split = {
            name
            for name, placement in zip(own, tensor.placements, strict=True)
            if _sharded_dimension(placement) is not None
        }
    return {name: mesh.size(dim) for dim, name in enumerate(names) if name not in split}


@dataclass(frozen=True)
class HeldShard:
    """One version of a rank's shard in a run whose model spans ranks; it moves as a unit.

    Args:
        number: of the shard of the model, see Grid.shard.
        progress: progress of the run, the fields of a Progress.
        applied: see AppliedSteps.
        tensors: this rank's shards by "model/name", "optimizer/name/entry" and similar names, and
            replicated tensors ("loss_scale/scale").
    """

    number: int
    progress: dict[str, Any]
    applied: int
    tensors: dict[str, Tensor]

    @property
    def step(self) -> int:
        """The step after which it is the state."""
        return int(self.progress["step"])


def transfer_shards(
    transfers: Sequence[Transfer], rank: int, own: Mapping[int, HeldShard]
) -> HeldShard | None:
    """Run the transfers of whole shards; return the shard that this rank receives, or None.

    Every rank calls it. Only the receivers of a shard allocate memory for it.

    Args:
        rank: this one.
        own: the shards that it holds, by number; not changed.
    """
    received = None
    for each in transfers:
        among = sorted({each.source, *each.receivers})
        with passing_set(among) as group:
            if rank == each.source:
                _broadcast(own[each.interval.start], each, group)
            elif rank in among:
                received = _broadcast(None, each, group)
    return received


def _broadcast(own: HeldShard | None, each: Transfer, group: ProcessSet) -> HeldShard:
    held: Mapping[str, Tensor] = own.tensors if own else {}
    layout = {key: [[*t.shape], str(t.dtype).removeprefix("torch.")] for key, t in held.items()}
    shard = each.interval.start  # see placeholder
    name = f"shard.{shard}"
    state = [layout, own.progress, own.applied] if own else None
    theirs, progress, applied = broadcast_json(state, f"{name}.layout", each.source, group)
    tensors = {
        key: held[key].cpu() if key in held else torch.empty(shape, dtype=getattr(torch, dtype))
        for key, (shape, dtype) in theirs.items()
    }
    broadcast_tensors(tensors, name, each.source, group)
    return HeldShard(shard, progress, applied, tensors)
