"""The parameters whose gradients are exchanged, and how a task may freeze them during a run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from hvdtrain.errors import UnsupportedTaskError
from hvdtrain.optim.optimizer import parameter_names


class TrainedParameters:
    """Parameters of an optimizer, in the model's order: backward reaches them in reverse order.

    A task may freeze parameters during a run (`requires_grad_(False)`) and unfreeze them again.
    Their gradients are still sent, as zeros, so that no rank waits for another and sums are rounded
    as before; then `rest` removes them, and the optimizer skips these parameters: no momentum, no
    weight decay.

    Args:
        optimizer: over parameters of `model`.
        model: gives the parameters their names and their order.

    Attributes:
        names: name of each parameter.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.names = parameter_names(optimizer, model)
        self.in_order = [p for p in model.parameters() if p in self.names]
        self._unknown = [(n, p) for n, p in model.named_parameters() if p not in self.names]

    def frozen(self) -> list[bool]:
        """Whether the task has frozen each parameter on this rank.

        Raises:
            UnsupportedTaskError: the task unfroze a parameter that was frozen when it created the
                model.
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
        """Exclude frozen parameters from this step; `frozen` must be identical on every rank."""
        for parameter, rests in zip(self.in_order, frozen, strict=True):
            if rests:
                parameter.grad = None
