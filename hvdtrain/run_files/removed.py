"""Files of a run that someone removes, moves or replaces while the run trains."""

from __future__ import annotations

import os
from pathlib import Path

from hvdtrain.log import logger


def content_of_removed(path: Path, descriptor: int) -> bytes:
    """Return the content of an open file that has lost its name, and log that it is made again."""
    try:
        content, lost = os.pread(descriptor, os.fstat(descriptor).st_size, 0), ""
    except OSError as error:  # such as of a file that another host has removed
        content, lost = b"", f", without its content ({error.strerror})"
    logger.warning("%s was removed or moved while the run trains: it is made again%s", path, lost)
    return content
