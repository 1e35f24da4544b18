"""Optimizers, schedules and layers of third parties, each in a small model of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version

import torch

from tests.support.third_parties.features import FEATURES
from tests.support.third_parties.optimizers import OPTIMIZERS
from tests.support.third_parties.part import Part
from tests.support.third_parties.schedules import SCHEDULES

GROUPS = {"optimizers": OPTIMIZERS, "schedules and averages": SCHEDULES, "layers": FEATURES}
# Row -> (distribution, what builds the part).
PARTS: dict[str, tuple[str, Callable[[], Part]]] = {**OPTIMIZERS, **SCHEDULES, **FEATURES}


def installed(name: str) -> str:
    """Return the version of a part's distribution; "" if it is not installed."""
    try:
        return version(PARTS[name][0]).partition("+")[0]
    except PackageNotFoundError:
        return ""


def built(names: Iterable[str], seed: int = 0) -> dict[str, Part]:
    """Return parts by name; the initial values of a part depend on the seed alone."""
    found = {}
    for name in names:
        torch.manual_seed(seed)
        found[name] = PARTS[name][1]()
    return found
