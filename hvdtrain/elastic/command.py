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
    found = _python_command(command)
    if found is None or not found.module:
        return found if found and os.path.isfile(found.script) else None
    file = find_module(found.script, _module_directories(""))
    return None if file is None else found._replace(script=str(file))


def runs_hvdtrain(command: Sequence[str]) -> bool:
    """Whether a command starts ranks of hvdtrain, which request their ranks themselves.

    A script that uses hvdtrain.training is recognized by its text and its project's modules;
    HVDTRAIN_ELASTIC=1 marks other commands that start hvdtrain.
    """
    script = script_command(command)
    known = training_command(command) is not None or (script is not None and script.own_loop)
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
    if (found := _python_command(command)) is None:
        flags = _flags_of_console_script([*command])
    elif found.module:
        flags = _flags_of_module([found.script, *found.flags])
    elif PurePath(found.script).parts[-2:] == ("hvdtrain", "train.py"):
        flags = found.flags
    else:
        flags = _flags_of_console_script([found.script, *found.flags])
    return None if flags is None else TrainingCommand(found.program if found else 0, flags)


def _python_command(command: Sequence[str]) -> ScriptCommand | None:
    """Split the arguments of the first interpreter in a command; a module is not looked for."""
    names = [PurePath(word).name for word in command]
    program = next((at for at, name in enumerate(names) if _PYTHON.fullmatch(name)), len(names))
    rest = [*command[program + 1 :]]
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            return ScriptCommand(program, word, rest, module=False)
        if word.startswith("--"):
            del rest[: word in _VALUED_LONG]
            continue
        # Letters may be joined, the last one also with its value: -um hvdtrain.train, -Wignore.
        at = next((at for at, letter in enumerate(word) if letter in "cmWX"), 0)
        option, value = word[at], word[at + 1 :]
        if option == "c":
            return None
        if option == "m":
            rest = [value, *rest] if value else rest
            return ScriptCommand(program, rest[0], rest[1:], module=True) if rest else None
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
