"""Parts of a page that are text: the end of the log, and the configuration."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from hvdtrain.report.tables import ReportTable
from hvdtrain.run_files.events_file import last_lines
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.untrusted import number, parse_yaml, printable_lines, read_regular, shown

_LINES = 40
_MOST = 100_000  # characters of a configuration


def of_run(path: Path) -> list[dict[str, Any]]:
    """The texts of RUN's page; a text that cannot be read is omitted. The log opens at its end."""
    title = f"Log of rank 0 (last {_LINES} lines)"
    found: list[dict[str, Any]] = [
        {"title": title, "text": _log(path), "from_end": True},
        {"title": "Configuration", "text": configuration(path)[:_MOST]},
    ]
    return [text for text in found if text["text"]]


def configuration(path: Path) -> str:
    """Return the text of RUN/config.yaml; "" if it cannot be read."""
    try:
        return read_regular(RunDirectory(path).config).decode("utf-8", "replace")
    except OSError:
        return ""


def _log(path: Path) -> str:
    lines = last_lines(RunDirectory(path).logs / "rank_00000.jsonl")[-_LINES:]
    return "\n".join(map(_log_line, lines))


def _log_line(line: dict[str, Any]) -> str:
    when = number(line.get("time"))
    known = when is not None and 0 <= when < 1e11
    clock = time.strftime("%H:%M:%S", time.gmtime(when)) if known else "?"
    level = line.get("level")
    words = [
        clock,
        "" if level == "info" else f"{level}:",
        *map(line.get, ("message", "traceback")),
    ]
    return printable_lines(" ".join(str(word) for word in words if word))


def differences(texts: Mapping[str, str]) -> ReportTable:
    """Table of the keys whose values differ between the configurations of runs.

    Old keys are compared under their current names; run.id, the name of a run, is omitted.

    Args:
        texts: name of a run -> text of its config.yaml.
    """
    found = {name: _values(text) for name, text in texts.items()}
    keys = sorted({key for values in found.values() for key in values})
    rows = [
        [key, *(values.get(key, "–") for values in found.values())]
        for key in keys
        if key != "run.id"
    ]
    unequal = [row for row in rows if len(set(row[1:])) > 1]
    note = "" if unequal else "The configurations are equal, or cannot be read."
    head = ["key", *found]
    return ReportTable("Configuration: differences", head, unequal, note, words=len(head))


@lru_cache(32)
def _values(text: str) -> dict[str, str]:
    """Return the values of a configuration by key, such as optim.lr; {} if it is not a mapping."""
    try:
        content = parse_yaml(text)
    except ValueError:
        return {}
    waiting = [*content.items()] if isinstance(content, dict) else []
    found = {}
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict) and value:
            waiting += [(f"{key}.{name}", v) for name, v in value.items()]
        else:
            found[str(key)] = shown(value)
    return found
