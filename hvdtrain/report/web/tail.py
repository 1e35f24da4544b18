"""Incremental reading of JSON-lines files that other processes write."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.untrusted import json_object, open_regular

CHUNK = 4 * 2**20  # bytes read at a time: a fraction of a second
_REMEMBERED = 512
_END = 64 * 1024


@dataclass
class News:
    """Result of reading a file.

    Args:
        restarted: the file was replaced or is shorter: earlier content is no longer valid.
        lines: the JSON objects of its new complete lines.
        torn: number of new lines that are not JSON objects.
        left: bytes not read yet.
    """

    restarted: bool = False
    lines: list[dict[str, Any]] = field(default_factory=list)
    torn: int = 0
    left: int = 0


class Tail:
    """A file, read from the end of the last read; an incomplete last line is read later.

    A run removes lines after a failure. The bytes before the current position are compared again,
    to detect whether earlier content is unchanged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self._before = b""

    def read(self) -> News:
        """Read up to CHUNK more bytes; no lines if the file does not exist.

        Raises:
            OSError: it cannot be read.
        """
        try:
            with open_regular(self._path) as file:
                return self._read(file)
        except FileNotFoundError:
            return News(restarted=self._forget())

    def _read(self, file: Any) -> News:
        news = News()
        file.seek(self._place - len(self._before))
        if file.read(len(self._before)) != self._before:
            news.restarted = self._forget()
            file.seek(0)
        content = file.read(CHUNK)
        end = content.rfind(b"\n") + 1
        if not end and len(content) == CHUNK:
            end = CHUNK  # no line of hvdtrain is this long
        for line in content[:end].splitlines():
            found = json_object(line)
            if found is not None:
                news.lines.append(found)
            elif line.strip():
                news.torn += 1
        self._place += end
        self._before = (self._before + content[:end])[-_REMEMBERED:]
        if len(content) == CHUNK:
            news.left = max(0, os.fstat(file.fileno()).st_size - self._place)
        return news

    def _forget(self) -> bool:
        """Reset; return whether anything was known."""
        known, self._place, self._before = self._place > 0, 0, b""
        return known


class LastLine:
    """The last complete line of a file, whatever the file's size."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._line: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Return the line; {} if there is none.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            with open_regular(self._path) as file:
                facts = os.fstat(file.fileno())
                stamp = facts.st_size, facts.st_mtime_ns
                if stamp != self._stamp:
                    file.seek(max(0, facts.st_size - _END))
                    lines = reversed(file.read(_END).split(b"\n")[:-1])
                    self._line = next(filter(None, map(json_object, lines)), {})
                    self._stamp = stamp
        except FileNotFoundError:
            self._stamp, self._line = None, {}
        return self._line
