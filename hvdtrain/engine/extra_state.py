"""State of modules that is neither a parameter nor a buffer: torch's get_extra_state()."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hvdtrain.errors import UserError
from hvdtrain.runtime.plain_values import decode, encode, json_of, with_json
from hvdtrain.runtime.state_part import Scope
from hvdtrain.runtime.tensor_shards import difference
from hvdtrain.runtime.wrappers import plain_name


class ExtraState:
    """The replicated part "extra": what get_extra_state() of modules returns, by module name.

    It is not compared between ranks: forward passes may change it.

    Attributes:
        modules: by name, those that have such state; without any there is no such part.
    """

    name = "extra"
    scope: Scope = "replicated"

    def __init__(self, model: nn.Module) -> None:
        usual = nn.Module.get_extra_state
        self.modules = {
            plain_name(f"{name}.").removesuffix("."): module
            for name, module in model.named_modules()
            if getattr(type(module), "get_extra_state", usual) is not usual
        }
        self._initial = self.tensors() if self.modules else {}

    def tensors(self) -> dict[str, Tensor]:
        """See StatePart; copies.

        Raises:
            UserError: a module returns something that is not plain.
        """
        tensors: dict[str, Tensor] = {}
        content = {
            name: encode(module.get_extra_state(), f"get_extra_state() of {name!r}", tensors)
            for name, module in self.modules.items()
        }
        return with_json(content, tensors)

    def compared(self) -> dict[str, Tensor]:
        """See StatePart."""
        return {}

    def load(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """See StatePart."""
        tensors = saved[0] if saved else self._initial
        if not difference(self.tensors(), tensors):
            return
        content: dict[str, Any] = json_of(tensors)
        if unknown := content.keys() - self.modules.keys():
            raise UserError(
                f"the checkpoint has the extra state of modules {sorted(unknown)}, which this "
                "model lacks"
            )
        for name, state in content.items():
            self.modules[name].set_extra_state(decode(state, tensors))
