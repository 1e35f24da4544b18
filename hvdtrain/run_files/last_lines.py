"""The end of a file of JSON lines, however long the file is."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

_BYTES = 1 << 16  # that are read first


def last_lines(path: Path, event: str = "") -> list[dict[str, Any]]:
    """The JSON objects in a file's last lines, none where it cannot be read; torn ones are passed
    over.

    Args:
        event: the lines go back to one with this event, where the file has one.
    """
    size = _BYTES
    try:
        with open(path, "rb") as file:
            whole = file.seek(0, os.SEEK_END)
            while True:
                file.seek(max(0, whole - size))
                found = _objects(file.read(size))
                if not event or size >= whole or any(o.get("event") == event for o in found):
                    return found
                size *= 8
    except OSError:
        return []


def _objects(text: bytes) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        with suppress(ValueError):
            content = json.loads(line)
            if isinstance(content, dict):
                found.append(content)
    return found
