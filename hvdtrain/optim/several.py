"""Several optimizers of one model that step together, such as those of a GAN."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hvdtrain.errors import UserError


class SeveralOptimizers(Optimizer):
    """One optimizer of the parameter groups of several, which share its groups and state.

    Attributes:
        by_name: the optimizers.

    Raises:
        UserError: a parameter belongs to two of them.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self.by_name = dict(optimizers)
        owner: dict[Tensor, str] = {}
        for name, optimizer in self.by_name.items():
            for parameter in parameters_of(optimizer):
                if parameter in owner:
                    raise UserError(
                        f"the optimizers {owner[parameter]} and {name} share a parameter: each "
                        "parameter belongs to one optimizer"
                    )
                owner[parameter] = name
        # `Optimizer` keeps these dicts, so a rate that is set in one is set in the other.
        super().__init__([g for o in self.by_name.values() for g in o.param_groups], {})
        for optimizer in self.by_name.values():
            self.state.update(optimizer.state)
            optimizer.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step each of them; parameters without a gradient are skipped."""
        assert closure is None
        for optimizer in self.by_name.values():
            optimizer.step()


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
