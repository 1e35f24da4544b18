"""Recognition of launcher commands that start training, from their words and their script."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from hvdtrain.elastic.mentions import find_module, uses

_PYTHON = re.compile(r"pythonw?[\d.]*")
# Interpreter options followed by a value, unless it is joined to them.
_VALUED = ("W", "X")
_VALUED_LONG = ("--check-hash-based-pycs",)


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
    """A command `python SCRIPT ...`, or `python -m MODULE ...` with a module of a project.

    Args:
        program: index of the word that is the interpreter.
        script: path of the file that is run.
        flags: the words after it, also the script's own arguments.
        module: it is a module.
    """

    program: int
    script: str
    flags: list[str]
    module: bool

    @property
    def own_loop(self) -> bool:
        """Whether the script, or a module that it imports, uses hvdtrain.training."""
        return self._uses("hvdtrain", "training")

    @property
    def horovod_elastic(self) -> bool:
        """Whether the script uses Horovod's elastic API and not hvdtrain.training."""
        return self._uses("horovod", "elastic") and not self.own_loop

    def _uses(self, package: str, part: str) -> bool:
        directory = "" if self.module else os.path.dirname(self.script)
        return uses(Path(self.script), package, part, _module_directories(directory))


def _module_directories(first: str) -> list[str]:
    """Return where a project has its modules: the script's directory, and PYTHONPATH.

    Directories of installed packages, which modules of clusters add to it, are left out.
    """
    found = [first or os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    return [path for path in found if not path.rstrip("/").endswith("-packages")]


def script_command(command: Sequence[str]) -> ScriptCommand | None:
    """Split a command `python SCRIPT ...`, if it is one and the script is a file.

    The same for `python -m MODULE ...`, if the module is found, and is not hvdtrain's.
    """
    words = list(command)
    for i, word in enumerate(words):
        if _PYTHON.fullmatch(PurePath(word).name):
            at = i + 1
            while at < len(words) and words[at].startswith("-"):
                if words[at] == "-m" and at + 1 < len(words):
                    found = find_module(words[at + 1], _module_directories(""))
                    if found is None:
                        return None
                    return ScriptCommand(i, str(found), words[at + 2 :], module=True)
                if words[at][1:2] in ("c", "m"):
                    return None
                at += 2 if words[at] in ("-W", "-X") else 1
            if at < len(words) and os.path.isfile(words[at]):
                return ScriptCommand(i, words[at], words[at + 1 :], module=False)
            return None
    return None


def runs_hvdtrain(command: Sequence[str]) -> bool:
    """Whether a command starts ranks of hvdtrain, which request their ranks themselves.

    A script that uses hvdtrain.training is recognized by its text and its project's modules;
    HVDTRAIN_ELASTIC=1 marks other commands that start hvdtrain.
    """
    script = script_command(command)
    known = starts_training(command) or (script is not None and script.own_loop)
    return known or os.environ.get("HVDTRAIN_ELASTIC") == "1"


def horovod_script(command: Sequence[str]) -> list[str] | None:
    """Return the command of a rank for an unchanged script of Horovod's elastic API.

    None: the command is not `python SCRIPT ...` with such a script, or it starts ranks of hvdtrain.
    """
    script = script_command(command)
    if script is None or script.module or runs_hvdtrain(command) or not script.horovod_elastic:
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
