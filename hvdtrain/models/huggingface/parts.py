"""Functions shared by the layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from hvdtrain.errors import UserError


def layer(theirs: str, weights: Mapping[str, Tensor], ours: str) -> dict[str, Tensor]:
    """Rename the weight of a layer, and its bias if it has one."""
    named = {f"{theirs}.{name}": f"{ours}.{name}" for name in ("weight", "bias")}
    return {there: weights[here] for there, here in named.items() if here in weights}


def check_facts(facts: Iterable[tuple[str, Any, str, Any]]) -> None:
    """Compare settings that have no weights but change the result.

    Args:
        facts: (name in config.json, value there, key of hvdtrain, its value).

    Raises:
        UserError: two values differ.
    """
    wrong = [
        f"{name} is {theirs} in config.json, and {key} is {ours}"
        for name, theirs, key, ours in facts
        if theirs != ours
    ]
    if wrong:
        raise UserError("; ".join(wrong))
