"""The runs under a folder."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from hvdtrain.report.web.live import LiveRun
from hvdtrain.report.web.overview import Overview

_LOOKED_AT_SECONDS = 60.0  # figures of a run that nobody has looked at for so long are dropped
_LIST_SECONDS = 1.0  # a list is good for so long, however many ask for it


@dataclass
class _LookedAt:
    """A run whose figures are kept.

    Args:
        lock: one thread reads its files at a time.
        last: when somebody looked at it, a monotonic clock.
    """

    live: LiveRun
    lock: Lock = field(default_factory=Lock)
    last: float = 0.0


class Runs:
    """Those under a root, or one of them; safe to be asked by many threads.

    A folder that leads out of the root (a link) is none of them.

    Args:
        root: the folder in which they lie.
        only: the name of the one that is shown; "" for all.
    """

    def __init__(self, root: Path, only: str = "") -> None:
        self._root = root
        self._only = only
        self._overviews: dict[str, Overview] = {}
        self._live: dict[str, _LookedAt] = {}
        self._rows: list[dict[str, Any]] = []
        self._listed = float("-inf")
        self._list_lock, self._live_lock = Lock(), Lock()

    def rows(self) -> list[dict[str, Any]]:
        """A row for each run, by name.

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
        """What the page of a run shows.

        Raises:
            KeyError: there is no such run.
            OSError: its files cannot be read.
        """
        path = self.path(name)
        now = time.monotonic()
        with self._live_lock:
            found = self._live.setdefault(name, _LookedAt(LiveRun(path)))
            found.last = now
            oldest = now - _LOOKED_AT_SECONDS
            self._live = {n: kept for n, kept in self._live.items() if kept.last > oldest}
        with found.lock:
            return found.live.refresh()

    def path(self, name: str) -> Path:
        """RUN of a name; KeyError where there is no such run."""
        # Not by the path: a name that is not in the list may be any.
        if not self._is_shown(name) or name not in os.listdir(self._root) or not self._is_run(name):
            with self._live_lock:
                self._live.pop(name, None)
            raise KeyError(name)
        return self._root / name

    def _names(self) -> list[str]:
        return sorted(n for n in os.listdir(self._root) if self._is_shown(n) and self._is_run(n))

    def _is_shown(self, name: str) -> bool:
        # A name that is no UTF-8 cannot stand in a page's address.
        return self._only in ("", name) and name.isprintable()

    def _is_run(self, name: str) -> bool:
        folder = self._root / name
        try:
            inside = folder.resolve().parent == self._root.resolve()
            return inside and (folder / "manifest.json").is_file()
        except (OSError, RuntimeError):  # a link to itself
            return False


def _row(name: str, overview: Overview) -> dict[str, Any]:
    try:
        overview.refresh()
        return overview.row()
    except OSError as error:
        return {"name": name, "state": f"cannot be read ({error.strerror})"}
