"""State of a model that spans ranks: each rank saves its pieces, any layout can read them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.checkpoint.spread import SpreadPart, open_part
from hvdtrain.errors import UserError
from hvdtrain.optim.ema import Ema
from hvdtrain.optim.optimizer import parameter_names, set_state_tensors, state_tensors
from hvdtrain.parallel.pieces import holders_mesh, is_first_holder, piece
from hvdtrain.runtime.mesh import Mesh
from hvdtrain.runtime.parts import local, model_tensors
from hvdtrain.runtime.pieces import Piece, box
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
