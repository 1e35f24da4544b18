"""Files of JSON lines that others write: what is new in them, and nothing read twice."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.untrusted import json_object, open_regular

CHUNK = 4 * 2**20  # bytes that are read at a time: a fraction of a second
_REMEMBERED = 512
_END = 64 * 1024


@dataclass
class News:
    """What a look at a file has found.

    Args:
        restarted: the file is another one, or shorter: what was known of it does not hold.
        lines: the JSON objects of its new whole lines.
        torn: how many new lines are none.
        left: bytes that were not read yet.
    """

    restarted: bool = False
    lines: list[dict[str, Any]] = field(default_factory=list)
    torn: int = 0
    left: int = 0


class Tail:
    """A file from where the last look ended; a last line without its end waits for that.

    A run takes lines back after a failure: what was read is known to stand there still by the
    bytes before the place, which are looked at again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self._before = b""

    def read(self) -> News:
        """At most CHUNK bytes more; no lines where there is no such file.

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
            end = CHUNK  # no line of ours is so long
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
        """Returns whether anything was known."""
        known, self._place, self._before = self._place > 0, 0, b""
        return known


class LastLine:
    """The last whole line of a file, however long that is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._line: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """{} where there is none.

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
