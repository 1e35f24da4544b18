"""The runs in a directory."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from hvdtrain.report.web.live import LiveRun
from hvdtrain.report.web.overview import Overview

_LOOKED_AT_SECONDS = 60.0  # data of a run that is not requested for this long is dropped
_LIST_SECONDS = 1.0  # lifetime of the list, for any number of requests


@dataclass
class _CachedRun:
    """A run whose data is cached.

    Args:
        lock: only one thread reads its files at a time.
        last: time of the last request, on a monotonic clock.
    """

    live: LiveRun
    lock: Lock = field(default_factory=Lock)
    last: float = 0.0


class Runs:
    """The runs in a root directory, or one of them; thread-safe.

    A link to a directory outside the root is not a run.

    Args:
        root: the directory that contains the runs.
        only: the name of the only run to show; "" for all.
    """

    def __init__(self, root: Path, only: str = "") -> None:
        self._root = root
        self._only = only
        self._overviews: dict[str, Overview] = {}
        self._live: dict[str, _CachedRun] = {}
        self._rows: list[dict[str, Any]] = []
        self._listed = float("-inf")
        self._list_lock, self._live_lock = Lock(), Lock()

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each run, by name.

        Raises:
            OSError: the root cannot be read.
        """
        with self._list_lock:
            if time.monotonic() - self._listed > _LIST_SECONDS:
                names = self._names()
                kept = self._overviews
                self._overviews = {
                    name: kept.get(name) or Overview(self._root / name) for name in names
                }
                self._rows = [_row(name, found) for name, found in self._overviews.items()]
                self._listed = time.monotonic()
            return self._rows

    def run(self, name: str) -> dict[str, Any]:
        """Return the data of a run's page.

        Raises:
            KeyError: there is no such run.
            OSError: its files cannot be read.
        """
        path = self.path(name)
        now = time.monotonic()
        with self._live_lock:
            found = self._live.setdefault(name, _CachedRun(LiveRun(path)))
            found.last = now
            oldest = now - _LOOKED_AT_SECONDS
            self._live = {n: kept for n, kept in self._live.items() if kept.last > oldest}
        with found.lock:
            return found.live.refresh()

    def path(self, name: str) -> Path:
        """Return the directory of a run; raise KeyError if there is no such run."""
        # Check the listing, not the path: a name that is not in the listing may be any path.
        if not self._is_shown(name) or name not in os.listdir(self._root) or not self._is_run(name):
            with self._live_lock:
                self._live.pop(name, None)
            raise KeyError(name)
        return self._root / name

    def _names(self) -> list[str]:
        return sorted(n for n in os.listdir(self._root) if self._is_shown(n) and self._is_run(n))

    def _is_shown(self, name: str) -> bool:
        # A name that is not UTF-8 cannot be part of a page's address.
        return self._only in ("", name) and name.isprintable()

    def _is_run(self, name: str) -> bool:
        directory = self._root / name
        try:
            inside = directory.resolve().parent == self._root.resolve()
            return inside and (directory / "manifest.json").is_file()
        except (OSError, RuntimeError):  # a link to itself
            return False


def _row(name: str, overview: Overview) -> dict[str, Any]:
    try:
        overview.refresh()
        return overview.row()
    except OSError as error:
        return {"name": name, "state": f"cannot be read ({error.strerror})"}
