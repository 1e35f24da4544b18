"""Limits of a driver's two servers: open files, and connections that have proved nothing yet."""

from __future__ import annotations

import asyncio
import errno
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_MOST_FILES = 1 << 17


def raise_file_limit() -> tuple[int, int]:
    """Raise the soft limit on open files; return it and the hard limit as they were before."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = before
    with suppress(OSError, ValueError):
        # Not to any hard limit: some programs close all descriptors up to the soft one.
        most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    return before


class UnprovenConnections:
    """Connections whose peers have not proved yet that they have the job's secret.

    At the limit, which is a share of the open files of this process, the oldest one makes room.
    """

    def __init__(self, share: int) -> None:
        self._most = max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // share)
        self._writers: dict[asyncio.StreamWriter, None] = {}  # oldest first

    @contextmanager
    def admitted(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Context in which a connection is unproven."""
        if len(self._writers) >= self._most:
            oldest = next(iter(self._writers))
            del self._writers[oldest]
            oldest.transport.abort()
        self._writers[writer] = None
        try:
            yield
        finally:
            self._writers.pop(writer, None)


def report_missing_files(loop: asyncio.AbstractEventLoop, say: Callable[[str], None]) -> None:
    """Say once, not at each attempt, that the loop's server has too few open files."""
    said = False

    def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal said
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif not said:
            said = True
            allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            say(
                f"{error.strerror}: the driver may have {allowed} and needs about 8 for each rank, "
                "so connections wait; raise the hard limit (ulimit -Hn, limits.conf)"
            )

    loop.set_exception_handler(on_error)
