"""Several optimizers of one model that step together, such as those of a GAN."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hvdtrain.errors import UserError


class _States(MutableMapping[Tensor, Any]):
    """The states of several optimizers by parameter; each optimizer keeps its own."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self._owners: dict[Tensor, Optimizer] = {}

    def _of(self, parameter: Tensor) -> Any:
        if parameter not in self._owners:  # also after a wrapper has replaced parameters
            own = [*self._optimizers.values()]
            self._owners = {p: optimizer for optimizer in own for p in parameters_of(optimizer)}
        return self._owners[parameter].state

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._of(parameter)[parameter]  # a defaultdict, as in torch: it adds an entry

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in optimizer.state for optimizer in self._optimizers.values())

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        if parameter not in self:
            return default
        return self[parameter]

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        self._of(parameter)[parameter] = value

    def __delitem__(self, parameter: Tensor) -> None:
        del self._of(parameter)[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers.values():
            yield from (key for key in optimizer.state if isinstance(key, Tensor))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.state.clear()


class SeveralOptimizers(Optimizer):
    """One optimizer of the parameter groups of several; its state is a view of their states.

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
        self.state = _States(self.by_name)  # type: ignore[assignment]

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step each of them; parameters without a gradient are skipped."""
        assert closure is None
        for optimizer in self.by_name.values():
            optimizer.step()


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
