"""State of a model that spans ranks: each rank saves its shards, and any layout can read them.

A tensor that is split is a DTensor: each dimension of its mesh shards one of its dimensions or
replicates it. Shard divides as `torch.chunk` does: shards of ceil(size / ranks), the last ones
smaller or empty.

In an elastic run, shards are sent to the next generation's replicas, see `plan_transfers`.
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
from hvdtrain.runtime.collectives import ProcessSet, broadcast_json, broadcast_tensors, passing_set
from hvdtrain.runtime.mesh import Grid, Mesh
from hvdtrain.runtime.shards import Piece, ShardLostError, box, local, model_tensors
from hvdtrain.runtime.state_part import Scope


class Saves:
    """Which pieces this rank saves: in the first replica, as first holder of the piece.

    Args:
        mesh: of the run.
        elsewhere: names of parameters that another stage of the pipeline saves.
    """

    def __init__(self, mesh: Mesh, elsewhere: Container[str] = ()) -> None:
        self._first_replica = mesh.data.rank == 0
        self._same_layers = holders_mesh(mesh.axes)
        self._elsewhere = elsewhere

    def has(self, name: str, tensor: Tensor) -> bool:
        """Whether this rank saves its piece of a tensor, or of one that is split in the same way.

        Args:
            name: of the parameter or buffer that it belongs to.
        """
        if not self._first_replica or name in self._elsewhere:
            return False
        return self._same_layers is None or is_first_holder(tensor, self._same_layers)


class SpannedModel:
    """The sharded part "model": parameters and saved buffers, by the names of the whole model."""

    name = "model"
    scope: Scope = "sharded"

    def __init__(self, model: nn.Module, saves: Saves) -> None:
        self._model = model
        self._saves = saves

    def tensors(self) -> dict[str, Tensor]:
        """Pieces that this rank saves."""
        return {name: part for name, (_, part) in self._own().items()}

    def pieces(self) -> dict[str, Piece]:
        """Place of each of `tensors` in its whole tensor."""
        return {name: where for name, (where, _) in self._own().items()}

    def _own(self) -> dict[str, tuple[Piece, Tensor]]:
        tensors = model_tensors(self._model).items()
        return {name: piece(t) for name, t in tensors if self._saves.has(name, t)}

    def compared(self) -> dict[str, Tensor]:
        """Parameters only: a task may keep buffers that differ between ranks."""
        return {name: local(p) for name, p in self._model.named_parameters()}

    def held(self) -> dict[str, Tensor]:
        """All pieces of this rank, in the same memory."""
        return {name: local(t) for name, t in model_tensors(self._model).items()}

    @torch.no_grad()
    def take(self, held: Mapping[str, Tensor]) -> None:
        """Copy the result of `held` of a rank with the same shard."""
        for name, own in self.held().items():
            own.copy_(held[name])

    def load(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        """Do nothing: files are loaded by `read`, and `start_over` sets the weights itself."""
        assert not pieces

    @torch.no_grad()
    def read(self, folder: Path, version: int) -> None:
        """Load this rank's pieces from a checkpoint, whichever rank saved them.

        Raises:
            UserError: it does not match, or is damaged.
        """
        saved, live = _opened(folder, self.name, self._model), model_tensors(self._model)
        for name, tensor in live.items():
            if name not in saved.names() or saved.shape(name) != tensor.shape:
                raise UserError(
                    f"checkpoint {folder} is of another model: it has no {name} of the shape "
                    f"{[*tensor.shape]}; use the configuration it was made with, or another run.id"
                )
            where, part = piece(tensor)
            part.copy_(saved.whole(name)[box(where, part)])


@torch.no_grad()
def take_over(model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Copy from whole tensors into a model of which this rank holds shards.

    Args:
        whole: parameters and saved buffers by name, including those of other ranks' shards.
    """
    for name, tensor in model_tensors(model).items():
        where, part = piece(tensor)
        part.copy_(whole[name][box(where, part)])


class SpannedOptimizer:
    """The sharded part "optimizer": "parameter name/entry"; empty before the first step.

    An entry is a count, or it is split like its parameter: the optimizer steps on plain tensors,
    see LocalOptimizer, which do not record how they are split.
    """

    name = "optimizer"
    scope: Scope = "sharded"

    def __init__(self, optimizer: Optimizer, model: nn.Module, saves: Saves) -> None:
        self._optimizer = optimizer
        self._model = model
        self._saves = saves

    def tensors(self) -> dict[str, Tensor]:
        """Pieces that this rank saves."""
        return {key: entry for key, (_, entry) in self._own().items()}

    def pieces(self) -> dict[str, Piece]:
        """Place of each of `tensors` in its whole tensor."""
        return {key: piece(split)[0] for key, (split, _) in self._own().items()}

    def _own(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(tensor that is split like the entry, the entry)."""
        found, parameters = {}, self._parameters()
        for key, entry in state_tensors(self._optimizer, self._model).items():
            name = key.rpartition("/")[0]
            split = parameters[name] if entry.dim() else entry
            if self._saves.has(name, split):
                found[key] = split, entry
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

    def load(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        assert not pieces
        self._optimizer.state.clear()

    @torch.no_grad()
    def read(self, folder: Path, version: int) -> None:
        """As SpannedModel.read."""
        saved, tensors = _opened(folder, self.name, self._model), {}
        parameters = self._parameters()
        for key in saved.names():
            parameter = parameters.get(key.rpartition("/")[0])
            if parameter is not None:  # else it belongs to another rank's shard
                tensors[key] = _like(parameter, saved.whole(key))
        set_state_tensors(self._optimizer, self._model, tensors)


class SpannedEma:
    """The sharded part "ema": averages by the names of their parameters."""

    scope: Scope = "sharded"

    def __init__(self, ema: Ema, model: nn.Module, saves: Saves) -> None:
        self.name = ema.name
        self._ema, self._model, self._saves = ema, model, saves

    def tensors(self) -> dict[str, Tensor]:
        """Pieces that this rank saves."""
        return {n: t for n, t in self._ema.tensors().items() if self._saved(n)}

    def pieces(self) -> dict[str, Piece]:
        """Place of each of `tensors` in its whole tensor."""
        parameters = self._ema.parameters
        return {n: piece(parameters[n])[0] for n in self._ema.tensors() if self._saved(n)}

    def _saved(self, name: str) -> bool:
        return self._saves.has(name, self._ema.parameters[name])

    def compared(self) -> dict[str, Tensor]:
        return self._ema.tensors()

    def held(self) -> dict[str, Tensor]:
        """As SpannedModel.held; empty before the first step."""
        return self._ema.tensors()

    def take(self, held: Mapping[str, Tensor]) -> None:
        """As SpannedModel.take; this average then owns the tensors."""
        self._ema.load([held] if held else [])

    def load(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        assert not pieces
        self._ema.load(())

    @torch.no_grad()
    def read(self, folder: Path, version: int) -> None:
        """As SpannedModel.read."""
        saved, found = _opened(folder, self.name, self._model), {}
        for name, parameter in self._ema.parameters.items() if saved.names() else ():
            where, part = piece(parameter)
            found[name] = saved.whole(name)[box(where, part)].clone()
        self._ema.load([found])


def _opened(folder: Path, part: str, model: nn.Module) -> SpreadPart:
    saved = open_part(folder, part, model)
    if saved is None:
        raise UserError(f"checkpoint {folder} has no {part}")
    return saved


def _like(parameter: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's piece of an optimizer's entry; the whole entry if its shape differs."""
    if whole.shape != parameter.shape:
        return whole.clone()
    where, part = piece(parameter)
    return whole[box(where, part)].clone()


def piece(tensor: Tensor) -> tuple[Piece, Tensor]:
    """Return the place of this rank's piece of `tensor`, and the piece, in the same memory.

    A plain tensor is one piece.

    Args:
        tensor: a parameter, buffer, gradient or entry of an optimizer's state; if a DTensor, with
            placements Shard, FSDP2's strided Shard, and Replicate.

    Raises:
        ValueError: this rank is not in the tensor's mesh, or the tensor is still to be summed over
            ranks.
    """
    part = local(tensor)
    if not isinstance(tensor, DTensor):
        return Piece((*part.shape,), offsets=(0,) * part.dim()), part
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        raise ValueError("this rank is not in the tensor's mesh")
    sizes = tuple(tensor.device_mesh.shape)
    offsets, lengths = extent(tuple(tensor.shape), sizes, tuple(place), tensor.placements)
    assert tuple(part.shape) == lengths, f"{tuple(part.shape)} is not {lengths}"
    return Piece((*tensor.shape,), offsets=offsets), part


def extent(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    place: tuple[int, ...],
    placements: Iterable[Placement],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, lengths) of the piece of a tensor of `shape` that stands at `place` in a mesh.

    Args:
        mesh: sizes of its dimensions, each with one of `placements`.

    Raises:
        ValueError: a placement does not determine a piece of the tensor.
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


def holders(tensor: Tensor, mesh: DeviceMesh) -> int:
    """Number of ranks that hold the same piece of `tensor` as this rank, including this one.

    Args:
        mesh: of the ranks that hold the tensor or pieces of it (the ranks of one pipeline stage of
            one replica), with named dimensions; a DTensor's mesh is this or a part of it.
    """
    number = 1
    for size in _sizes_of_copies(tensor, mesh).values():
        number *= size
    return number


def holders_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Mesh of the replica's ranks that hold the same layers; None: only this rank."""
    assert mesh.mesh_dim_names is not None
    names = tuple(name for name in mesh.mesh_dim_names if name != "pipeline")
    return mesh[names] if names else None


def is_first_holder(tensor: Tensor, mesh: DeviceMesh) -> bool:
    """Whether this rank is the first of the ranks that hold the same piece, see `holders`."""
    return all(mesh.get_local_rank(name) == 0 for name in _sizes_of_copies(tensor, mesh))


def _sizes_of_copies(tensor: Tensor, mesh: DeviceMesh) -> dict[str, int]:
    """Sizes of the dimensions of `mesh` along which all ranks hold the same piece."""
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
        number: of the shard of the model, see Grid.part.
        progress: progress of the run, the fields of a Progress.
        applied: see AppliedSteps.
        tensors: this rank's pieces by "model/name", "optimizer/name/entry" and similar names, and
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


@dataclass(frozen=True)
class Transfer:
    """Shard that one rank sends to others."""

    shard: int
    source: int
    receivers: tuple[int, ...]


def plan_transfers(held: Sequence[int | None], grid: Grid) -> list[Transfer]:
    """Plan the transfers that give every rank its shard.

    Args:
        held: the shard that each rank holds as of the most advanced step, or None.

    Raises:
        ShardLostError: no rank holds some shard.
    """
    transfers = []
    for shard in range(grid.replica_size):
        if shard not in held:
            raise ShardLostError(f"shard {shard} of {grid.replica_size}")
        wanted = [rank for rank in grid.ranks if grid.part(rank) == shard]
        lacking = sorted(rank for rank in wanted if held[rank] != shard)
        if lacking:
            transfers.append(Transfer(shard, held.index(shard), (*lacking,)))
    return transfers


def transfer(transfers: Sequence[Transfer], rank: int, own: HeldShard | None) -> HeldShard | None:
    """Run the transfers and return the shard that this rank receives, or None.

    Every rank calls it.

    Args:
        rank: this one.
        own: the shard that it holds; not changed.
    """
    received = None
    for each in transfers:
        among = sorted({each.source, *each.receivers})
        with passing_set(among) as group:
            if rank == each.source:
                _broadcast(own, each, group)
            elif rank in among:
                received = _broadcast(None, each, group)
    return received


def _broadcast(own: HeldShard | None, each: Transfer, group: ProcessSet) -> HeldShard:
    held: Mapping[str, Tensor] = own.tensors if own else {}
    layout = {key: [[*t.shape], str(t.dtype).removeprefix("torch.")] for key, t in held.items()}
    name = f"part.{each.shard}"
    told = [layout, own.progress, own.applied] if own else None
    theirs, progress, applied = broadcast_json(told, f"{name}.layout", each.source, group)
    tensors = {
        key: held[key].cpu() if key in held else torch.empty(shape, dtype=getattr(torch, dtype))
        for key, (shape, dtype) in theirs.items()
    }
    broadcast_tensors(tensors, name, each.source, group)
    return HeldShard(each.shard, progress, applied, tensors)
