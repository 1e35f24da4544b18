"""State that a script with its own loop keeps in addition to model and optimizer."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from hvdtrain.engine.structure import ModelStructure
from hvdtrain.errors import UserError
from hvdtrain.optim.several import SeveralOptimizers, parameters_of
from hvdtrain.runtime.plain_values import decode, encode, json_of, with_json
from hvdtrain.runtime.state_part import Scope
from hvdtrain.runtime.tensor_shards import flattened


class RegisteredObjects(MutableMapping[str, Any]):
    """`training.state`: objects by name; names are added and removed before the loop only.

    Attributes:
        closed: the loop has begun.
    """

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self.closed = False

    def __getitem__(self, name: str) -> Any:
        return self._objects[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if self.closed and name not in self._objects:
            raise UserError(
                f"training.state[{name!r}] was set for the first time inside the loop, where an "
                "earlier step's state lacks it: set it before the loop, for example to None"
            )
        self._objects[name] = value

    def __delitem__(self, name: str) -> None:
        if self.closed:
            raise UserError(
                f"training.state[{name!r}] was removed inside the loop: set it to None instead"
            )
        del self._objects[name]

    def __ior__(self, other: Mapping[str, Any]) -> RegisteredObjects:
        self.update(other)
        return self

    def __iter__(self) -> Iterator[str]:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)

    def __repr__(self) -> str:
        return repr(self._objects)


_ELEMENTWISE = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
)


class ScriptState:
    """The replicated part "script": registered objects, the options of the optimizer's groups, and
    the names of frozen parameters and of modules in eval mode.

    It is the state between two iterations of the loop, see engine/iteration.py.

    Args:
        optimizer: its groups' options, such as the learning rate, may be set by the script.

    Attributes:
        parameters: of each of several optimizers, by its name; None: there is one.
        objects: by name; each has state_dict() and load_state_dict(), or is a plain value, see
            runtime/plain_values.py.
        structure: of the model, which knows frozen parameters and modes; None: unknown.
    """

    name = "script"
    scope: Scope = "replicated"

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.parameters: dict[str, list[Tensor]] | None = None
        if isinstance(optimizer, SeveralOptimizers):
            self.parameters = {name: parameters_of(o) for name, o in optimizer.by_name.items()}
        self.objects = RegisteredObjects()
        self.structure: ModelStructure | None = None
        self._saved: dict[str, Tensor] = {}
        self._kept: tuple[Any, dict[str, Tensor]] | None = None  # of `keep`, not in `_saved` yet
        self._first: dict[str, Tensor] = {}  # the state from before the loop
        self._own: bytes | None = None  # digest of the objects' state, if nothing has changed it

    def begin(self) -> None:
        """Keep the state from before the loop; from now on its names are fixed."""
        self.keep()
        self.objects.closed = True
        self._first = self._tensors
        self._own = _digest(self._first)

    @cached_property
    def has_elementwise_optimizer(self) -> bool:
        """Whether an element's update depends on that element alone, as is known of some."""
        one = self._optimizer
        own = one.by_name.values() if isinstance(one, SeveralOptimizers) else [one]
        return all(type(optimizer) in _ELEMENTWISE for optimizer in own)

    def keep(self) -> None:
        """Copy the objects' state.

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
        classes = {n: type(o).__qualname__ for n, o in self.objects.items() if _has_state(o)}
        content: dict[str, Any] = {
            "classes": classes,
            "groups": encode(groups, "the optimizer's groups", tensors),
            "objects": {
                name: encode(state, f"training.state[{name!r}]", tensors)
                for name, state in states.items()
            },
        }
        if self.structure is not None:
            frozen, evaluating = self.structure.frozen(), self.structure.evaluating()
            if frozen != self.structure.frozen_first:
                content["frozen"] = frozen
            if evaluating != self.structure.evaluating_first:
                content["evaluating"] = evaluating
        self._kept = content, tensors

    @property
    def _tensors(self) -> dict[str, Tensor]:
        """The state of the last `keep` or `load`; most steps do not need its JSON."""
        if self._kept is not None:
            self._saved, self._kept = with_json(*self._kept), None
        return self._saved

    def restore(self) -> None:
        """Give the objects the state of the last `keep` or `load`.

        Lists, sets, dicts and tensors are filled in place: the script may hold them under other
        names.
        If the objects have this state already, because a new run begins, they are not touched.

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
        for name, saved_class in content.get("classes", {}).items():
            registered = type(self.objects[name]).__qualname__
            if registered != saved_class:
                raise UserError(
                    f"training.state[{name!r}] was saved as {saved_class}, but the script "
                    f"registers {registered}: register an object of the same class before the "
                    "loop, and do not replace it by one of another class"
                )
        own, self._own = self._own, None
        if own is not None and own == _digest(self._tensors):
            return
        pairs = zip(self._optimizer.param_groups, content["groups"], strict=True)
        for group, saved in pairs:
            group.update(decode(saved, self._tensors))
        if self.structure is not None:
            structure = self.structure
            structure.freeze({*content.get("frozen", structure.frozen_first)})
            structure.set_evaluating({*content.get("evaluating", structure.evaluating_first)})
        for name, state in found.items():
            value = decode(state, self._tensors)
            if _has_state(self.objects[name]):
                self.objects[name].load_state_dict(value)
            else:
                self.objects[name] = _filled(self.objects[name], value, set())

    def tensors(self) -> dict[str, Tensor]:
        """See StatePart: of the last `keep` or `load`."""
        return self._tensors

    def compared(self) -> dict[str, Tensor]:
        """See StatePart: without the modes, as one rank may evaluate between two iterations."""
        content = json_of(self._tensors)
        content.pop("evaluating", None)
        return with_json(content, dict(self._tensors))

    def by_name(self) -> dict[str, dict[str, Tensor]]:
        """Tensors of `compared`, by the words of a script for what they are of."""
        content = json_of(self._tensors)
        named = {f"training.state[{name!r}]": one for name, one in content["objects"].items()}
        named["the options of the optimizer's groups, such as lr"] = content["groups"]
        found: dict[str, dict[str, Tensor]] = {}
        for name, encoded in named.items():
            tensors: dict[str, Tensor] = {}
            own = encode(decode(encoded, self._tensors), name, tensors)
            found[name] = with_json(own, tensors)
        return found

    def load(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """See StatePart; `restore` gives it to the objects."""
        [tensors] = saved or [self._first]
        self._kept = None
        self._saved = {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _has_state(value: object) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _digest(tensors: Mapping[str, Tensor]) -> bytes:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(flattened(tensor.cpu()).view(torch.uint8).numpy().tobytes())
    return digest.digest()


@torch.no_grad()
def _filled(current: Any, value: Any, used: set[int]) -> Any:
    """Return a value in the memory of the object that it replaces, if they are of one kind.

    Args:
        used: ids of objects that have been filled: an object may now be in several places.
    """
    if not isinstance(current, type(value)) or id(current) in used:
        return value
    used.add(id(current))
    if isinstance(value, Tensor | np.ndarray):
        if current.shape == value.shape and current.dtype == value.dtype:
            current[...] = value
            return current
        return value
    if type(current) is not type(value):
        return value
    if isinstance(value, list | deque):
        items = [_filled(old, new, used) for old, new in zip(current, value, strict=False)]
        items += [*value][len(items) :]
        current.clear()
        current.extend(items)
        return current
    if isinstance(value, set):
        current.clear()
        current.update(value)
        return current
    if isinstance(value, dict):
        filled = {k: _filled(current[k], v, used) if k in current else v for k, v in value.items()}
        current.clear()
        current.update(filled)
        return current
    return value
