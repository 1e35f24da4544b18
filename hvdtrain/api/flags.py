"""Convert the arguments of `hvdtrain.run` to command-line flags, which reach every host."""

from __future__ import annotations

import difflib
import importlib.util
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from hvdtrain.config import Config, presets
from hvdtrain.config_files import flag_names, read_yaml
from hvdtrain.engine.config import RunConfig
from hvdtrain.errors import UserError
from hvdtrain.run_files.run_directory import default_id, new_directory
from hvdtrain.tasks import installed


def task_flag(task: str | type) -> str:
    """Return `--config=...` for a preset or a file, or `--task=...`.

    Raises:
        UserError: the task does not exist, or the ranks cannot import the class.
    """
    if isinstance(task, type):
        return f"--task={_importable(task)}"
    if not isinstance(task, str):
        raise UserError(f"task: a name or a class is expected, not {task!r}")
    if task in presets():
        return f"--config={task}"
    if Path(task).is_file():
        return f"--config={Path(task).absolute()}"
    if task.startswith("__main__:"):
        raise _not_importable(task.partition(":")[2], "in this notebook or script")
    if task in installed() or ":" in task:
        return f"--task={task}"
    known = [*presets(), *installed()]
    near = difflib.get_close_matches(task, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    raise UserError(
        f"task: no preset, task or file is called {task!r}; {hint} (your own: package.module:Class)"
    )


# The script has its own optimizer; hvdtrain clips and averages.
_OPTIM_KEYS = ("optim.clip_norm", "optim.ema_decay")


def _importable(task: type) -> str:
    name, module = task.__qualname__, task.__module__
    if module != "__main__" and "." not in name:
        return f"{module}:{name}"
    where = "inside a function or class" if module != "__main__" else "in this notebook or script"
    raise _not_importable(name.rpartition(".")[2], where)


def _not_importable(name: str, where: str) -> UserError:
    return UserError(
        f"task: {name} is defined {where}, which the ranks cannot import: put it into a file of "
        f"its own, such as {name.lower()}.py, and give task='{name.lower()}:{name}'"
    )


def config_flags(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield `--optim.lr=0.1` for {"optim.lr": 0.1} or {"optim": {"lr": 0.1}}."""
    for key, value in config.items():
        if isinstance(value, Mapping) and "." not in key:
            yield from (f"--{key}.{name}={_word(inner)}" for name, inner in value.items())
        else:
            yield f"--{key}={_word(value)}"


def configuration_words(words: Sequence[str]) -> Iterator[str]:
    """Yield the words that set keys of the configuration, `--section.key value`, of a script."""
    sections = {field.name for field in fields(Config)}
    rest = iter(words)
    for word in rest:
        name, assigned, _ = word.removeprefix("--").partition("=")
        section, dot, _ = name.partition(".")
        if word.startswith("--") and dot and section in sections:
            yield word
            if not assigned:
                yield from itertools.islice(rest, 1)


def unread_words(words: Sequence[str], config: str | Path | Mapping[str, Any]) -> Iterator[str]:
    """Yield keys among a script's own flags, and --config, that `config` does not set."""
    if isinstance(config, Mapping):
        keys = {f.name for f in fields(Config) if f.default is not MISSING} - {"task"}
        yield from sorted({"config", *keys}.intersection(flag_names(words)).difference(config))


def check_effect(words: Sequence[str]) -> None:
    """Raise UserError if a flag sets what a script with its own loop controls."""
    for key in flag_names(words):
        if key.startswith(("optim.", "schedule.")) and key not in _OPTIM_KEYS:
            raise UserError(
                f"{key} on the command line has no effect: the script has its own optimizer and "
                f"learning rate; of optim and schedule, only {' and '.join(_OPTIM_KEYS)} apply"
            )


def _word(value: Any) -> str:
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """Number held by a numpy or torch scalar; for other values, such as a path, their text."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


def run_directory(task: str, config: Mapping[str, Any]) -> Path:
    """Return RUN/ as an absolute path, from the keys or else from the file named by `task`.

    `task` is a flag made by `task_flag`. If no key names the directory, create a new one with a
    unique name.
    """
    option, _, name = task.partition("=")
    is_file = option == "--config" and name not in presets()
    of_file = read_yaml(Path(name)) if is_file else {}
    keys: dict[str, Any] = {}
    for layer in (of_file, config):
        section = layer.get("run")
        keys |= section if isinstance(section, Mapping) else {}
        keys |= {key[4:]: value for key, value in layer.items() if key.startswith("run.")}
    root = Path(keys.get("root", RunConfig.root)).absolute()
    if keys.get("id"):
        return root / str(keys["id"])
    return new_directory(root, default_id(Path(name).stem if is_file else name))


def import_directory(task: str) -> Path | None:
    """Directory from which the ranks import the module of a user-defined task.

    It is the directory from which this process imports the module. None for a built-in task, or if
    there is no such module.
    """
    module, colon, _ = task.removeprefix("--task=").partition(":")
    if not (colon and task.startswith("--task=")):
        return None
    spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).absolute().parent
    return Path(spec.origin).absolute().parent if spec.has_location and spec.origin else None
