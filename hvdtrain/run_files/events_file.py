"""RUN/events.jsonl: starts, checkpoints and ends of a run; reading of JSON lines files."""

from __future__ import annotations

import errno
import json
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from hvdtrain.file_thread import call_aside
from hvdtrain.files import is_open_at
from hvdtrain.log import logger
from hvdtrain.run_files.ownership import Ownership
from hvdtrain.run_files.removed import content_of_removed
from hvdtrain.untrusted import json_object, json_objects, open_regular

# Timeout for confirming the ownership of the run: events are rare, so a short wait is acceptable.
_HELD_SECONDS = 1.0
_RETRY_SECONDS = 1.0
# `last_lines`: size of the first read, and of the last
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 64 << 20


class EventsFile:
    """Append-only file of events, on the current rank 0 only. Errors never stop the training.

    A file that is removed or moved is made again with the next event, with all lines.

    Args:
        path: the file; it is created by the first event.
        ownership: while it is not known whether this process owns the run, events wait.

    Attributes:
        failures: how often the file could not be written.
    """

    def __init__(self, path: Path, ownership: Ownership | None = None) -> None:
        self._path = path
        self._ownership = ownership or Ownership(path.parent)
        self.failures = 0
        # Each use of it is a single operation, because `write` appends without the lock.
        self._waiting: list[bytes] = []
        self._retry: Timer | None = None
        self._failed = False
        self._kept: int | None = None  # descriptor, which has the lines if the file is removed
        self._lock = Lock()  # of the file; held as long as a disk does not respond

    def write(self, event: str, **fields: Any) -> None:
        """Append an event with its time (unix, seconds); it reaches the operating system at once.

        If writing fails, the error is logged once, and the event is kept and retried every second,
        because this process may be killed before the next event.
        """
        line = json.dumps({"event": event, "time": time.time(), **fields})
        self._waiting.append(line.encode() + b"\n")
        self._ownership.held(_HELD_SECONDS)
        call_aside(self._write_waiting)

    def lines(self) -> list[dict[str, Any]]:
        """All events of the run, in the file or still waiting."""
        with self._lock:
            written = read_lines(self._path) if self._path.exists() else []
            return written + [json.loads(line) for line in self._waiting]

    def _write_waiting(self) -> None:
        with self._lock:
            if self._ownership.held():
                self._try_to_append()
            if self._waiting and self._retry is None:
                self._retry = Timer(_RETRY_SECONDS, self._try_again)
                self._retry.daemon = True
                self._retry.start()

    def _try_again(self) -> None:
        self._retry = None
        call_aside(self._write_waiting)

    def _try_to_append(self) -> None:
        try:
            self._append()
            self._failed = False
        except OSError as error:
            if not self._failed:
                self.failures += 1
                logger.error("%s cannot be written (%s); training continues", self._path, error)
            self._failed = True

    def _append(self) -> None:
        moved = self._kept is not None and not is_open_at(self._kept, self._path)
        if self._kept is not None and moved and not self._path.exists():
            self._ownership.confirm(0.0)
            content = content_of_removed(self._path, self._kept)
            self._waiting[:0] = content.splitlines(keepends=True)
            self._path.parent.mkdir(parents=True, exist_ok=True)
        # Reopened each time: events are rare, and the file's end is then up to date.
        with open(self._path, "a+b", buffering=0) as file:
            if self._kept is None:
                self._kept = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._kept)
            elif moved:
                os.dup2(file.fileno(), self._kept, inheritable=False)
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a crash or a full disk left an incomplete line
                    file.write(b"\n")
            while self._waiting:
                if file.write(self._waiting[0]) != len(self._waiting[0]):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                del self._waiting[0]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one per line, in order; incomplete lines are skipped.

    Raises:
        OSError: the file does not exist or cannot be read.
    """
    return [content for content in each_line(path) if content is not None]


def each_line(path: Path) -> Iterator[dict[str, Any] | None]:
    """Same as `read_lines`, but as an iterator, with None for an incomplete line. For long runs,
    whose files are much larger than the lines of interest.

    Raises:
        OSError: the file does not exist or cannot be read.
    """
    with open_regular(path) as file:
        yield from json_objects(file)


def last_lines(path: Path, event: str = "") -> list[dict[str, Any]]:
    """The JSON objects in a file's last lines; empty if it cannot be read. Skips incomplete lines.

    Args:
        event: include the last line with this event, if it is within the last 64 MiB.
    """
    size = _FIRST_BYTES
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
