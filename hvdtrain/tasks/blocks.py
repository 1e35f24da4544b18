"""The blocks of a model: repeated modules, which are compiled one by one."""

from __future__ import annotations

from typing import Any

from torch import nn

from hvdtrain.errors import UserError
from hvdtrain.tasks import optional


def blocks_of(task: Any, model: nn.Module) -> list[nn.Module]:
    """The modules of `Task.blocks`, or else of the largest nn.ModuleList; may be empty.

    The largest list is the one with the most parameter elements.

    Raises:
        UserError: the task names something that is not a module of the model.
    """
    named = optional(task, "blocks")
    if named is not None:
        blocks = list(named(model))
        modules = set(model.modules())
        foreign = [block for block in blocks if block not in modules]
        if foreign:
            raise UserError(
                f"the task's blocks(model) has a {type(foreign[0]).__name__} that is no module "
                "of the model"
            )
        return blocks
    lists: list[nn.Module] = [
        module for module in model.modules() if isinstance(module, nn.ModuleList)
    ]
    return list(max(lists, key=_numel).children()) if lists else []


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
