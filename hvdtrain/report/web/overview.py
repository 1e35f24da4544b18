"""One-line summary of a run: its state and progress, from what was added to its files."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.run_files.listing import run_state
from hvdtrain.run_files.owner_token import Token, read
from hvdtrain.run_files.ownership import STALE_SECONDS
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.untrusted import integer, json_object, number, open_regular, read_json

CHUNK = 4 * 2**20  # bytes read at a time: a fraction of a second
_REMEMBERED = 512
_END = 64 * 1024
SHOWN = 50  # restarts, the last ones
_START = ("cause", "source", "step", "world_size", "seconds", "time")


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


class Pulse:
    """Whether the process that owns a run, or its launcher, is alive: its count increases.

    Args:
        path: path of the token.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token: Token | None = None
        self._moved = 0.0

    def beats(self) -> bool:
        """Return whether it is alive; raise OSError if the token cannot be read."""
        token, now = read(self._path), time.monotonic()
        if token is None or token.ended:
            self._token = token
            return False
        if self._token is None:
            # The first call relies on the file's time; later calls compare no clocks.
            self._moved = now - max(0.0, time.time() - self._path.stat().st_mtime)
        elif token != self._token:
            self._moved = now
        self._token = token
        return now - self._moved < STALE_SECONDS


class Overview:
    """Summary of one run; `refresh` reads what was added to its files.

    Attributes:
        restarts: each start after the first step (the last SHOWN), from the events.
        began: Unix time of the first start; None if it is unknown.
        slow: ranks that are currently reported as slow.
        reading: bytes of the events not read yet.
    """

    def __init__(self, path: Path) -> None:
        directory = RunDirectory(path)
        self._name = path.name
        self._events = Tail(directory.events)
        self._last = LastLine(directory.metrics)
        self._manifest_path = directory.manifest
        self._superseded = directory.superseded_metrics
        self._owner, self._launcher = Pulse(path / ".owner"), Pulse(path / ".launch.owner")
        self.reading = 0
        self._line: dict[str, Any] = {}
        self._manifest: dict[str, Any] = {}
        self._alive = self._launched = False
        self._forget()

    def _forget(self) -> None:
        self.restarts: deque[dict[str, Any]] = deque(maxlen=SHOWN)
        self.slow: dict[tuple[Any, Any], dict[str, Any]] = {}
        self._start: dict[str, Any] = {}
        self.began: float | None = None
        self._starts = self._restarts = 0
        self._first = 0  # step of the first start
        self._stepped = False
        self._checkpoints = 0
        self._saved: int | None = None
        self._end: int | None = None
        self._early = False

    def refresh(self) -> None:
        """Read new content; raise OSError if a file cannot be read."""
        news = self._events.read()
        if news.restarted:
            self._forget()
        for event in news.lines:
            self._record(event)
        self.reading = news.left
        self._line = self._last.read()
        self._manifest = _content(self._manifest_path)
        self._alive, self._launched = self._owner.beats(), self._launcher.beats()

    def _record(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if (integer(event.get("step")) or 0) > self._first and self._starts:
            self._stepped = True
        if kind == "start":
            self._record_start(event)
        elif kind == "end":
            self._end = integer(event.get("exit_code"))
        elif kind == "early_stop":
            self._early = True
        elif kind == "checkpoint":
            self._checkpoints += 1
            self._saved = integer(event.get("step"))
        elif kind in ("straggler", "straggler_ended"):
            whose = str(event.get("rank")), str(event.get("stage"))
            self.slow.pop(whose, None)
            if kind == "straggler":
                self.slow[whose] = {
                    "rank": integer(event.get("rank")),
                    "host": str(event.get("host", "?")),
                    "phase": str(event.get("phase", "?")),
                    "step": integer(event.get("step")),
                }

    def _record_start(self, event: dict[str, Any]) -> None:
        before, self._start = self._start, event
        self._starts += 1
        self._end, self._early = None, False
        self.slow.clear()
        if self._starts == 1:
            when, seconds = number(event.get("time")), number(event.get("seconds"))
            self.began = None if when is None else when - (seconds or 0.0)
            self._first = integer(event.get("step")) or 0
        elif self._stepped or (event.get("cause") == "launch" and self._superseded.exists()):
            # Steps without an event: a new launch moved their lines to another file.
            self._restarts += 1
            found = {name: event.get(name) for name in _START}
            self.restarts.append(
                {
                    "number": self._restarts,
                    "cause": str(found["cause"] or "unknown"),
                    "source": str(found["source"] or "?"),
                    "step": integer(found["step"]),
                    "ranks_before": integer(before.get("world_size")),
                    "ranks_after": integer(found["world_size"]),
                    "seconds": number(found["seconds"]),
                    "time": number(found["time"]),
                }
            )

    def row(self) -> dict[str, Any]:
        """Row of the run list; None means unknown."""
        line = self._line
        when = number(line.get("time")) or number(self._start.get("time"))
        task = self._manifest.get("task")
        return {
            "name": self._name,
            "state": self._state(),
            "task": str(task) if task else None,
            "step": integer(line.get("step")),
            "total_steps": integer(self._start.get("total_steps")),
            "loss": number(line.get("loss")),
            "samples_per_second": number(line.get("samples_per_second")),
            "ranks": integer(self._start.get("world_size") or self._manifest.get("world_size")),
            "hosts": len(self._hosts()) or None,
            "restarts": self._restarts,
            "checkpoints": self._checkpoints,
            "saved_step": self._saved,
            "slow": len(self.slow),
            "age_seconds": None if when is None else max(0, round(time.time() - when)),
        }

    def host(self, rank: int) -> str:
        """The host of a rank of the last start."""
        hosts = self._hosts().items()
        return next((h for h, ranks in hosts if isinstance(ranks, list) and rank in ranks), "?")

    def _hosts(self) -> dict[str, Any]:
        hosts = self._start.get("hosts") or self._manifest.get("hosts")
        return hosts if isinstance(hosts, dict) else {}

    def _state(self) -> str:
        if self._end == 0 and self._early:
            return "stopped early"
        return run_state(self._starts > 0, self._end, self._alive, self._launched)


def _content(path: Path) -> dict[str, Any]:
    """Content of a small JSON file; {} if it is damaged or missing."""
    try:
        return read_json(path)
    except (FileNotFoundError, ValueError):
        return {}
