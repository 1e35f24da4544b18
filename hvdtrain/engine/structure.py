"""Layers and buffers of a script's model, which a run fixes, and which of them train."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration

from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.runtime.tensor_shards import model_tensors
from hvdtrain.runtime.wrappers import plain_name

_EARLIER = "before hvdtrain.training begins"


class ModelStructure:
    """The parameters and saved buffers that a model has when its script's loop begins.

    Optimizers, exchange and checkpoints of the run know only these. Frozen parameters may be
    unfrozen, and a buffer without elements may grow. torch calls a hook when a module registers a
    layer, a parameter or a buffer; only then they are compared.

    Attributes:
        frozen_first: names of the parameters that were frozen when the loop began.
        evaluating_first: names of the modules that were in eval mode then.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = {*model.modules()}
        self._parameters = _parameters(model)
        self._buffers = _shapes(model)
        self.frozen_first = self.frozen()
        self._by_name = {plain_name(name): module for name, module in model.named_modules()}
        self.evaluating_first = self.evaluating()
        self._changed = False
        self._hooks = [
            registration.register_module_module_registration_hook(self._note),
            registration.register_module_parameter_registration_hook(self._note),
            registration.register_module_buffer_registration_hook(self._note),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def _note(self, module: nn.Module, name: str, registered: object) -> None:
        if self._changed or module not in self._modules:
            return  # of another model: its attributes may be computed
        before = getattr(module, name, None)
        same = before is registered
        if isinstance(registered, Tensor) and not isinstance(registered, nn.Parameter):
            same = isinstance(before, Tensor) and before.shape == registered.shape
        self._changed = not same

    def check(self) -> None:
        """Compare the model, if something was registered in it since the last call.

        Raises:
            UserError: it has other parameters or buffers, or a buffer has another shape.
        """
        if not self._changed:
            return
        self._changed = False
        self._check_parameters(_parameters(self._model))
        self._check_buffers(_shapes(self._model))

    def _check_parameters(self, now: dict[str, nn.Parameter]) -> None:
        before = self._parameters
        for name in before | now:
            if before.get(name) is now.get(name):
                continue
            happened = (
                "added to" if name not in before
                else "removed from" if name not in now
                else "replaced in"
            )  # fmt: skip
            raise UserError(
                f"the parameter {name} was {happened} the model inside the loop, but the optimizer "
                f"and the checkpoints have those from its start: create all layers {_EARLIER}, and "
                "freeze those that train later (requires_grad_(False))"
            )

    def _check_buffers(self, now: dict[str, torch.Size]) -> None:
        before = self._buffers
        for name in before | now:
            if name in before and name in now and now[name] == before[name]:
                continue
            if name not in before:
                happened = "appeared in the model"
            elif name not in now:
                happened = "was removed from the model"
            elif before[name].numel():
                happened = f"changed its shape from {[*before[name]]} to {[*now[name]]}"
            else:
                continue  # it may grow, see GrowingBuffers
            raise UserError(
                f"the buffer {name} {happened} inside the loop, so a resumed run could not load "
                f"it: register it {_EARLIER}, with its full size, or without elements, as "
                "torch.empty(0) is: then it may grow. A buffer with persistent=False is not saved"
            )

    def frozen(self) -> list[str]:
        """Names of the parameters that do not require a gradient now."""
        return [name for name, p in self._parameters.items() if not p.requires_grad]

    def evaluating(self) -> list[str]:
        """Names of the modules that are in eval mode now."""
        return [name for name, module in self._by_name.items() if not module.training]

    def set_evaluating(self, names: Collection[str]) -> None:
        """Put these modules in eval mode and all others in train mode."""
        for name, module in self._by_name.items():
            module.training = name not in names

    def freeze(self, names: Collection[str]) -> None:
        """Freeze these parameters and no others, as at an earlier time of the run."""
        changed = []
        for name, parameter in self._parameters.items():
            trains = name not in names
            if parameter.requires_grad != trains:
                parameter.requires_grad_(trains)
                changed.append(name)
        if changed:
            logger.info(
                "%d parameters, such as %s, are frozen or trained as the run has left them",
                len(changed),
                changed[0],
            )


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): parameter for name, parameter in model.named_parameters()}


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Shapes of the saved buffers."""
    parameters = _parameters(model)
    return {n: t.shape for n, t in model_tensors(model).items() if n not in parameters}


class GrowingBuffers:
    """Saved buffers that are empty when a process builds the model; they may have any shape later.

    Args:
        model: as built.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = {
            plain_name(f"{prefix}.{name}" if prefix else name): (module, name)
            for prefix, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if not buffer.numel()
        }

    def fit(self, saved: dict[str, Tensor]) -> None:
        """Give them the shapes of saved tensors, by name."""
        for full_name, (module, name) in self._places.items():
            buffer, tensor = getattr(module, name), saved.get(full_name)
            if tensor is not None and tensor.shape != buffer.shape:
                setattr(module, name, buffer.new_empty(tensor.shape))
