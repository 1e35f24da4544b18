"""Recognition of launcher commands that start training, from their words alone."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

_PYTHON = re.compile(r"pythonw?[\d.]*")
# Interpreter options followed by a value, unless it is joined to them.
_VALUED = ("W", "X")
_VALUED_LONG = ("--check-hash-based-pycs",)


# A script that uses hvdtrain.training, in whatever way it is imported.
_OWN_LOOP = re.compile(r"^\s*(import|from)\s+hvdtrain\b", re.MULTILINE), re.compile(r"\btraining\b")
# A script that uses Horovod's elastic API: hvd.elastic, from horovod.torch.elastic import run, ...
_HOROVOD_ELASTIC = (
    re.compile(r"^\s*(import|from)\s+horovod\b", re.MULTILINE),
    re.compile(r"\w\.elastic\b|\bimport\s+elastic\b"),
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
        return self._mentions(_OWN_LOOP)

    @property
    def horovod_elastic(self) -> bool:
        """Whether the script's text uses Horovod's elastic API and not hvdtrain.training."""
        return self._mentions(_HOROVOD_ELASTIC) and not self.own_loop

    def _mentions(self, patterns: Sequence[re.Pattern[str]]) -> bool:
        try:
            with open(self.script, encoding="utf-8", errors="replace") as file:
                text = file.read(_SCRIPT_BYTES)
        except OSError:
            return False
        return all(pattern.search(text) for pattern in patterns)


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

    None: the command is not `python SCRIPT ...` with such a script, which is recognized by its
    text, or it starts ranks of hvdtrain.
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
