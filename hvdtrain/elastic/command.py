"""Recognition of launcher commands that start training, from their words and their script."""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

_PYTHON = re.compile(r"pythonw?[\d.]*")
# Interpreter options followed by a value, unless it is joined to them.
_VALUED = ("W", "X")
_VALUED_LONG = ("--check-hash-based-pycs",)


# A script that uses hvdtrain.training, in whatever way it is imported.
_OWN_LOOP = (
    re.compile(r"(^|[;:])\s*(from[ \t]+|import[ \t]([^\n;#]*[ \t,])?)hvdtrain\b", re.MULTILINE),
    re.compile(r"\btraining\b"),
)
_SCRIPT_BYTES = 1 << 20


class TrainingCommand(NamedTuple):
    """A command that starts training.

    Args:
        program: index of the word that is the interpreter, or `hvdtrain` itself.
        flags: the words passed to training.
    """

    program: int
    flags: list[str]


def starts_training(command: Sequence[str]) -> bool:
    """Whether a command is `hvdtrain train`, or Python with its module, console script or file."""
    return training_command(command) is not None


class ScriptCommand(NamedTuple):
    """A command `python SCRIPT ...`.

    Args:
        program: index of the word that is the interpreter.
        script: the path.
        flags: the words after it, also the script's own arguments.
    """

    program: int
    script: str
    flags: list[str]

    @property
    def own_loop(self) -> bool:
        """Whether the script's text uses hvdtrain.training."""
        text = self._read().decode(errors="replace")
        return all(pattern.search(text) for pattern in _OWN_LOOP) and not self.horovod_elastic

    @property
    def horovod_elastic(self) -> bool:
        """Whether the script uses Horovod's elastic API and not hvdtrain.training."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the script's own
                tree = ast.parse(self._read())
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return _uses(tree, "horovod", "elastic") and not _uses(tree, "hvdtrain", "training")

    def _read(self) -> bytes:
        try:
            with open(self.script, "rb") as file:
                return file.read(_SCRIPT_BYTES)
        except OSError:
            return b""


def _uses(tree: ast.AST, package: str, module: str) -> bool:
    """Whether a script imports a module of a package, or reads it as an attribute.

    Examples: hvd.elastic after `import horovod.torch as hvd`, and
    `from horovod.torch.elastic import run`.
    """
    imported: list[str] = []
    names: set[str] = set()  # bound to the package or one of its modules
    attributes: list[ast.expr] = []  # that have the attribute `module`
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = {alias.name: alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found = {
                f"{node.module}.{alias.name}": alias.asname or alias.name for alias in node.names
            }
        else:
            if isinstance(node, ast.Attribute) and node.attr == module:
                attributes.append(node.value)
            continue
        ours = [path for path in found if path.split(".")[0] == package]
        imported += ours
        names.update(found[path] for path in ours)
    return any(module in path.split(".") for path in imported) or any(
        _root(value) in names for value in attributes
    )


def _root(value: ast.expr) -> str:
    """Return the name at the start of a.b.c; "" for any other expression."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def script_command(command: Sequence[str]) -> ScriptCommand | None:
    """Split a command `python SCRIPT ...`, if it is one and the script is a file."""
    words = list(command)
    for i, word in enumerate(words):
        if _PYTHON.fullmatch(PurePath(word).name):
            at = i + 1
            while at < len(words) and words[at].startswith("-"):
                if words[at][1:2] in ("c", "m"):
                    return None
                at += 2 if words[at] in ("-W", "-X") else 1
            if at < len(words) and os.path.isfile(words[at]):
                return ScriptCommand(i, words[at], words[at + 1 :])
            return None
    return None


def runs_hvdtrain(command: Sequence[str]) -> bool:
    """Whether a command starts ranks of hvdtrain, which request their ranks themselves.

    A script that uses hvdtrain.training is recognized by its text; HVDTRAIN_ELASTIC=1 marks
    other commands that start hvdtrain.
    """
    script = script_command(command)
    known = starts_training(command) or (script is not None and script.own_loop)
    return known or os.environ.get("HVDTRAIN_ELASTIC") == "1"


def horovod_script(command: Sequence[str]) -> list[str] | None:
    """Return the command of a rank for an unchanged script of Horovod's elastic API.

    None: the command is not `python SCRIPT ...` with such a script, or it starts ranks of hvdtrain.
    """
    script = script_command(command)
    if script is None or not script.horovod_elastic or runs_hvdtrain(command):
        return None
    at = len(command) - len(script.flags) - 1
    return [*command[:at], "-m", "hvdtrain.elastic.horovod_script", *command[at:]]


def training_command(command: Sequence[str]) -> TrainingCommand | None:
    """Split a command that starts training; return None for any other command.

    Words before Python (numactl, env NAME=VALUE, a profiler) are skipped; arguments of another
    program are ignored.
    """
    words = list(command)
    for i, word in enumerate(words):
        if _PYTHON.fullmatch(PurePath(word).name):
            flags = _flags_of_python(words[i + 1 :])
            return None if flags is None else TrainingCommand(i, flags)
    flags = _flags_of_console_script(words)
    return None if flags is None else TrainingCommand(0, flags)


def _flags_of_python(arguments: list[str]) -> list[str] | None:
    """Flags of training in the interpreter's arguments: options, then a module, code or script."""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            if PurePath(word).parts[-2:] == ("hvdtrain", "train.py"):
                return rest
            return _flags_of_console_script([word, *rest])
        if word.startswith("--"):
            del rest[: word in _VALUED_LONG]
            continue
        # Letters may be joined, the last one also with its value: -um hvdtrain.train, -Wignore.
        at = next((at for at, letter in enumerate(word) if letter in "cmWX"), 0)
        option, value = word[at], word[at + 1 :]
        if option == "c":
            return None
        if option == "m":
            return _flags_of_module([value, *rest] if value else rest)
        del rest[: option in _VALUED and not value]
    return None


def _flags_of_module(words: list[str]) -> list[str] | None:
    if words[:1] == ["hvdtrain.train"]:
        return words[1:]
    return words[2:] if words[:2] == ["hvdtrain.cli", "train"] else None


def _flags_of_console_script(words: list[str]) -> list[str] | None:
    path = PurePath(words[0]) if words else PurePath()
    cli = path.name == "hvdtrain" or path.parts[-2:] == ("hvdtrain", "cli.py")
    return words[2:] if cli and words[1:2] == ["train"] else None
