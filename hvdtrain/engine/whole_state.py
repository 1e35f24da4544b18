"""The model and its optimizer, where every rank holds them whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.checkpoint.spread import by_names_of_now
from hvdtrain.errors import UserError
from hvdtrain.optim.optimizer import parameter_names, set_state_tensors, state_tensors
from hvdtrain.runtime.parts import model_tensors
from hvdtrain.runtime.state_part import Scope


class ModelState:
    """The replicated part "model": parameters and saved buffers, by name.

    Buffers are not compared: a task may keep some that are a rank's own.
    """

    name = "model"
    scope: Scope = "replicated"

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def tensors(self) -> dict[str, Tensor]:
        return model_tensors(self._model)

    def compared(self) -> dict[str, Tensor]:
        return {name: p.data for name, p in self._model.named_parameters()}

    def load(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        [tensors] = pieces
        _copy(by_names_of_now(self._model)(tensors), self.tensors())


class OptimizerState:
    """The replicated part "optimizer": "parameter name/entry"; empty before the first step."""

    name = "optimizer"
    scope: Scope = "replicated"

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._model = model

    def tensors(self) -> dict[str, Tensor]:
        return state_tensors(self._optimizer, self._model)

    def compared(self) -> dict[str, Tensor]:
        return self.tensors()

    def load(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        [tensors] = pieces
        tensors = by_names_of_now(self._model)(tensors)
        names = set(parameter_names(self._optimizer, self._model).values())
        unknown = {key.rpartition("/")[0] for key in tensors} - names
        if unknown:
            raise UserError(f"the checkpoint's optimizer knows parameters {sorted(unknown)}")
        set_state_tensors(self._optimizer, self._model, tensors)


def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    if source.keys() != target.keys() or any(source[k].shape != t.shape for k, t in target.items()):
        differing = sorted(
            key
            for key in source.keys() | target.keys()
            if key not in source or key not in target or source[key].shape != target[key].shape
        )
        raise UserError(
            f"the checkpoint is of another model: {len(differing)} tensors differ, such as "
            f"{differing[0]}; use the configuration it was made with, or another run.id"
        )
    for key, tensor in target.items():
        tensor.copy_(source[key])
