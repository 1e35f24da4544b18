"""The last lines of a JSON lines file, at a cost independent of the file's length."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hvdtrain.untrusted import json_object, open_regular

_BYTES = 1 << 16  # size of the first read
_MOST_BYTES = 64 << 20


def last_lines(path: Path, event: str = "") -> list[dict[str, Any]]:
    """The JSON objects in a file's last lines; empty if it cannot be read. Skips incomplete lines.

    Args:
        event: include the last line with this event, if it is within the last 64 MiB.
    """
    size = _BYTES
    try:
        with open_regular(path) as file:
            whole = file.seek(0, os.SEEK_END)
            while True:
                file.seek(max(0, whole - size))
                found = _objects(file.read(size))
                if (
                    not event
                    or size >= min(whole, _MOST_BYTES)
                    or any(o.get("event") == event for o in found)
                ):
                    return found
                size = min(8 * size, _MOST_BYTES)
    except OSError:
        return []


def _objects(text: bytes) -> list[dict[str, Any]]:
    return [found for line in text.splitlines() if (found := json_object(line)) is not None]
