"""Tiers of configuration keys: `basic`, `advanced` (the default) and `expert`.

A field of a configuration dataclass declares its tier where it declares its default:

    lr: float = basic(1e-3)

`--help` shows the basic keys, `--help all` and docs/configuration.md show all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import Field, field, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

TIERS = ("basic", "advanced", "expert")
_TIER = "tier"
T = TypeVar("T")


def basic(default: T | None = None, *, factory: Callable[[], T] | None = None) -> T:
    """Return the dataclass field of a key that most users set.

    Args:
        factory: makes the default, if it is mutable.
    """
    return _field("basic", default, factory)


def expert(default: T | None = None, *, factory: Callable[[], T] | None = None) -> T:
    """Return the dataclass field of a key that few users need; arguments as in `basic`."""
    return _field("expert", default, factory)


def _field(tier: str, default: Any, factory: Callable[[], Any] | None) -> Any:
    metadata = {_TIER: tier}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def tier_of(one: Field[Any]) -> str:
    """Return the tier of a dataclass's field."""
    return str(one.metadata.get(_TIER, "advanced"))


def tiers_of(owner: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, tier) of each key of a configuration dataclass and its groups."""
    hints = get_type_hints(owner)
    for one in fields(owner):
        hint, key = hints[one.name], f"{prefix}{one.name}"
        if isinstance(hint, type) and is_dataclass(hint):
            yield from tiers_of(hint, f"{key}.")
        elif one.init:
            yield key, tier_of(one)
