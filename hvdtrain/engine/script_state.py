"""State that a script with its own loop keeps in addition to model and optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hvdtrain.engine.structure import ModelStructure
from hvdtrain.errors import UserError
from hvdtrain.optim.several import SeveralOptimizers, parameters_of
from hvdtrain.runtime.plain_values import decode, encode, json_of, with_json
from hvdtrain.runtime.state_part import Scope


class ScriptState:
    """The replicated part "script": registered objects, the options of the optimizer's groups, the
    names of frozen parameters, and the last step's result.

    It is the state at the end of the last step's block. What the code after the block changes is
    not in it: after a failure or a resume that code is run again, from this state.

    Args:
        optimizer: its groups' options, such as the learning rate, may be set by the script.

    Attributes:
        parameters: of each of several optimizers, by its name; None: there is one.
        objects: by name; each has state_dict() and load_state_dict(), or is a plain value: numbers,
            text, None, and lists and dicts of them.
        result: of the last step, see `Step.result`.
        structure: of the model, whose frozen parameters are part of the state; None: unknown.
    """

    name = "script"
    scope: Scope = "replicated"

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.parameters: dict[str, list[Tensor]] | None = None
        if isinstance(optimizer, SeveralOptimizers):
            self.parameters = {name: parameters_of(o) for name, o in optimizer.by_name.items()}
        self.objects: dict[str, Any] = {}
        self.result: dict[str, float] = {}
        self.structure: ModelStructure | None = None
        self._tensors: dict[str, Tensor] = {}

    def keep(self) -> None:
        """Copy the result and the objects' state.

        Raises:
            UserError: an object cannot be saved.
        """
        tensors: dict[str, Tensor] = {}
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        states = {
            name: value.state_dict() if _has_state(value) else value
            for name, value in self.objects.items()
        }
        content: dict[str, Any] = {
            "result": self.result,
            "groups": encode(groups, "the optimizer's groups", tensors),
            "objects": {
                name: encode(state, f"training.state[{name!r}]", tensors)
                for name, state in states.items()
            },
        }
        if self.structure is not None and self.structure.frozen() != self.structure.frozen_first:
            content["frozen"] = self.structure.frozen()
        self._tensors = with_json(content, tensors)

    def restore(self) -> None:
        """Give the result and the objects the state of the last `keep` or `load`.

        Raises:
            UserError: it has other objects than are registered.
        """
        content = json_of(self._tensors)
        found = content["objects"]
        if found.keys() != self.objects.keys():
            raise UserError(
                f"the run has the state of {sorted(found) or 'no objects'}, but the script "
                f"registers {sorted(self.objects) or 'none'} in training.state: register the same "
                "objects before the loop"
            )
        self.result = content.get("result", {})  # older checkpoints have none
        pairs = zip(self._optimizer.param_groups, content["groups"], strict=True)
        for group, saved in pairs:
            group.update(decode(saved, self._tensors))
        if self.structure is not None:
            self.structure.freeze({*content.get("frozen", self.structure.frozen_first)})
        for name, state in found.items():
            value = decode(state, self._tensors)
            if _has_state(self.objects[name]):
                self.objects[name].load_state_dict(value)
            else:
                self.objects[name] = value

    def tensors(self) -> dict[str, Tensor]:
        """See StatePart: of the last `keep` or `load`."""
        return self._tensors

    def compared(self) -> dict[str, Tensor]:
        """See StatePart."""
        return self._tensors

    def load(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """See StatePart; `restore` gives it to the objects."""
        if saved:
            [tensors] = saved
            self._tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _has_state(value: object) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
