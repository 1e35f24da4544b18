"""`hvdtrain tasks`: the tasks that --task knows by name."""

from __future__ import annotations

import argparse
import re
import textwrap
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.tasks import BUILT_IN, installed, load_class, optional
from hvdtrain.text import aligned

_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the tasks that can be trained by name: built-in ones, and those that installed "
        "packages register as entry points of the group hvdtrain.tasks. With a NAME, also show the "
        "keys of its configuration."
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a task")


def run(args: argparse.Namespace) -> int:
    if args.name is not None:
        print("\n".join(_keys(load_class(args.name))))
        return 0
    rows = []
    for name, path in installed().items():
        try:
            about = _first_line(load_class(name))
        except (UserError, ImportError) as error:
            about = f"cannot be loaded: {error}"
        rows.append([name, about if name in BUILT_IN else f"{about} [{path}]"])
    print("\n".join(aligned(rows, left=(0, 1))))
    return 0


def _first_line(task: type) -> str:
    return (task.__doc__ or "no description").strip().partition("\n")[0]


def _keys(task: type) -> list[str]:
    lines = [_first_line(task)]
    config = optional(task, "Config")
    if config is None:
        return [*lines, "It has no keys of its own."]
    for name, default, text in _described(config, ""):
        lines.append(f"  --{name} (default: {default})")
        lines += textwrap.wrap(text, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return lines


def _described(config: Any, prefix: str) -> list[tuple[str, Any, str]]:
    """Return (key, default, description) of each field, also of nested dataclasses."""
    text = " ".join((config.__doc__ or "").split())
    found: list[tuple[str, Any, str]] = []
    names = [field.name for field in fields(config)]
    for field in fields(config):
        default = field.default if field.default is not MISSING else None
        if callable(field.default_factory):
            default = field.default_factory()
        if is_dataclass(default):
            found += _described(type(default), f"{prefix}{field.name}.")
            continue
        following = "|".join(map(re.escape, names))
        about = re.search(rf"\b{field.name}: (.*?)(?= (?:{following}): |$)", text)
        found.append((prefix + field.name, default, about.group(1) if about else ""))
    return found
