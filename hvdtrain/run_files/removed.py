"""Files of a run that someone removes, moves or replaces while the run trains."""

from __future__ import annotations

import os
from pathlib import Path

from hvdtrain.log import logger

_PART_BYTES = 1 << 24


def content_of_removed(path: Path, descriptor: int) -> bytes:
    """Return the content of an open file that has lost its name, and log that it is made again."""
    try:
        content, lost = b"", ""
        while part := os.pread(descriptor, _PART_BYTES, len(content)):
            content += part
    except OSError as error:  # such as of a file that another host has removed
        content, lost = b"", f", without its content ({error.strerror})"
    logger.warning("%s was removed or moved while the run trains: it is made again%s", path, lost)
    return content
