"""Horovod's timeline, which rank 0 writes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import horovod.torch as hvd


def can_start() -> bool:
    """Whether the timeline can be started later: HOROVOD_TIMELINE names no file."""
    return os.environ.get("HOROVOD_TIMELINE") == "DYNAMIC"


def start(path: Path) -> None:
    """Start the timeline.

    Raises:
        OSError: the file cannot be written, which Horovod would not report.
    """
    path.touch()
    hvd.start_timeline(str(path))


def stop() -> None:
    """Stop the timeline, also after a failure: Horovod must not write to it during shutdown."""
    with suppress(ValueError):
        hvd.stop_timeline()
