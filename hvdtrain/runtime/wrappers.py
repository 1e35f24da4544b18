"""Wrappers of modules, which put a prefix before the names of parameters and buffers.

A run has the same names with and without them: a script may add or remove torch.compile, or use its
model without them after the training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

T = TypeVar("T")

# Private: the attribute of torch.compile's module. If torch renames it, names of compiled models
# change; tests/single/test_wrappers.py detects it.
_COMPILED = "_orig_mod"
_PARALLEL = "module"


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model in torch.compile's module, DataParallel or DistributedDataParallel."""
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get(_COMPILED), nn.Module):
            model = inner
        else:
            return model


def plain_name(name: str) -> str:
    """Return the name of a parameter or buffer without the prefixes of compiled submodules."""
    return name.replace(f"{_COMPILED}.", "")


def plain_names(tensors: Mapping[str, T], own: Iterable[str]) -> dict[str, T]:
    """Return saved tensors by the names that they have without wrappers.

    Args:
        own: names in the model, without wrappers. A prefix `module.` that these lack was
            DataParallel's or DistributedDataParallel's.
    """
    plain = {plain_name(name): tensor for name, tensor in tensors.items()}
    prefix = f"{_PARALLEL}."
    parallel = all(name.startswith(prefix) for name in plain)
    if parallel and not any(name.startswith(prefix) for name in own):
        return {name.removeprefix(prefix): tensor for name, tensor in plain.items()}
    return plain
