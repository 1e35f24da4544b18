"""The parameters whose gradients are exchanged, and what a task may do to them in mid-run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from hvdtrain.errors import UnsupportedTaskError
from hvdtrain.optim.optimizer import parameter_names


class TrainedParameters:
    """Those of an optimizer, in the model's order: that is what backward runs through from the end.

    A task may freeze parameters in the middle of a run (`requires_grad_(False)`) and thaw them
    again. Their gradients travel nevertheless, as zeros, so that no rank waits for another and
    sums are rounded as before; `rest` then takes them away, and the optimizer passes these
    parameters over: no momentum, no weight decay.

    Args:
        optimizer: over parameters of `model`.
        model: gives the parameters their names and their order.

    Attributes:
        names: of each.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.names = parameter_names(optimizer, model)
        self.in_order = [p for p in model.parameters() if p in self.names]
        self._unknown = [(n, p) for n, p in model.named_parameters() if p not in self.names]

    def frozen(self) -> list[bool]:
        """Of each, whether the task has frozen it here.

        Raises:
            UnsupportedTaskError: the task wants to train a parameter that was frozen when it made
                the model.
        """
        for name, parameter in self._unknown:
            if parameter.requires_grad:
                raise UnsupportedTaskError(
                    f"the model's parameter {name} was frozen when the task made the model, so "
                    "the optimizer does not know it: let model() return it trainable, and freeze "
                    "it in loss() until it is to be trained"
                )
        return [not parameter.requires_grad for parameter in self.in_order]

    def rest(self, frozen: Sequence[bool]) -> None:
        """Lets parameters rest in this step; every rank names the same."""
        for parameter, rests in zip(self.in_order, frozen, strict=True):
            if rests:
                parameter.grad = None
