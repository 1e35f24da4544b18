"""State that a script with its own loop keeps in addition to model and optimizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvdtrain.errors import UserError
from hvdtrain.optim.several import SeveralOptimizers, parameters_of
from hvdtrain.runtime.state_part import Scope

_JSON = "json"
_KIND = "__hvdtrain__"  # in JSON: what a dict stands for


class ScriptState:
    """The replicated part "script": registered objects, the options of the optimizer's groups, and
    the last step's result.

    It is the state at the end of the last step's block. What the code after the block changes is
    not in it: after a failure or a resume that code is run again, from this state.

    Args:
        optimizer: its groups' options, such as the learning rate, may be set by the script.

    Attributes:
        parameters: of each of several optimizers, by its name; None: there is one.
        objects: by name; each has state_dict() and load_state_dict(), or is a plain value: numbers,
            text, None, and lists and dicts of them.
        result: of the last step, see `Step.result`.
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
        content = {
            "result": self.result,
            "groups": _encoded(groups, "the optimizer's groups", tensors),
            "objects": {
                name: _encoded(state, f"training.state[{name!r}]", tensors)
                for name, state in states.items()
            },
        }
        text = json.dumps(content).encode()
        tensors[_JSON] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._tensors = tensors

    def restore(self) -> None:
        """Give the result and the objects the state of the last `keep` or `load`.

        Raises:
            UserError: it has other objects than are registered.
        """
        content = json.loads(bytes(self._tensors[_JSON].cpu().tolist()))
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
            group.update(_decoded(saved, self._tensors))
        for name, state in found.items():
            value = _decoded(state, self._tensors)
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


def _encoded(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON, with tensors moved to `tensors`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        key = f"{len(tensors)}"
        tensors[key] = value.detach().clone()
        return {_KIND: "tensor", "key": key}
    if isinstance(value, list):
        return [_encoded(item, name, tensors) for item in value]
    if isinstance(value, tuple):
        return {_KIND: "tuple", "items": [_encoded(item, name, tensors) for item in value]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _KIND not in value:
            return {key: _encoded(item, name, tensors) for key, item in value.items()}
        pairs = [[_encoded(k, name, tensors), _encoded(v, name, tensors)] for k, v in value.items()]
        return {_KIND: "dict", "items": pairs}
    item = getattr(value, "item", None)
    if callable(item):  # a scalar of numpy
        return _encoded(item(), name, tensors)
    raise UserError(
        f"{name} has a {type(value).__name__}, which cannot be saved: give the object state_dict() "
        "and load_state_dict(), of tensors, numbers, text, lists and dicts"
    )


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_KIND):
        case "tensor":
            return tensors[value["key"]].clone()
        case "tuple":
            return tuple(_decoded(item, tensors) for item in value["items"])
        case "dict":
            return {_decoded(k, tensors): _decoded(v, tensors) for k, v in value["items"]}
    return {key: _decoded(item, tensors) for key, item in value.items()}
