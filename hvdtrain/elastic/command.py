"""Whether a command that a launcher is given starts training: from its words alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

_PYTHON = re.compile(r"pythonw?[\d.]*")
# Options of the interpreter that take a value, where it is not joined to them.
_VALUED = ("W", "X")
_VALUED_LONG = ("--check-hash-based-pycs",)


def starts_training(command: Sequence[str]) -> bool:
    """Whether it is `hvdtrain train`, or Python with hvdtrain's module, console script or file.

    What stands before Python (numactl, env NAME=VALUE, a profiler) is passed over; words that
    another program gets as its arguments say nothing.
    """
    words = list(command)
    for i, word in enumerate(words):
        if _PYTHON.fullmatch(PurePath(word).name):
            return _runs_training(words[i + 1 :])
    return _is_console_script(words)


def _runs_training(arguments: list[str]) -> bool:
    """The same for the interpreter's arguments: options, then a module, code or a script."""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            path = PurePath(word)
            return path.parts[-2:] == ("hvdtrain", "train.py") or _is_console_script([word, *rest])
        if word.startswith("--"):
            del rest[: word in _VALUED_LONG]
            continue
        # Letters may be joined, and a value to the last of them: -um hvdtrain.train, -Wignore.
        at = next((at for at, letter in enumerate(word) if letter in "cmWX"), 0)
        option, value = word[at], word[at + 1 :]
        if option in "cm":
            return option == "m" and _is_module([value, *rest] if value else rest)
        del rest[: option in _VALUED and not value]
    return False


def _is_module(words: list[str]) -> bool:
    return words[:1] == ["hvdtrain.train"] or words[:2] == ["hvdtrain.cli", "train"]


def _is_console_script(words: list[str]) -> bool:
    path = PurePath(words[0]) if words else PurePath()
    cli = path.name == "hvdtrain" or path.parts[-2:] == ("hvdtrain", "cli.py")
    return cli and words[1:2] == ["train"]
