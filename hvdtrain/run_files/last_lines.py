"""The end of a file of JSON lines, however long the file is."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

# The newest start has the names of all hosts, so it may be long.
_BYTES = 1 << 16


def last_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in a file's last lines, none where it cannot be read; torn ones are passed
    over."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError):
            content = json.loads(line)
            if isinstance(content, dict):
                found.append(content)
    return found
