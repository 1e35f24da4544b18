"""Whole reports, made in the background: for a long run, browsers would time out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread

from hvdtrain.errors import UserError

_KEPT = 4


@dataclass
class _Report:
    stamp: tuple[float, ...]
    page: str = ""
    problem: str = ""


class Reports:
    """Pages as written by `hvdtrain report RUN`, made one at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._made: dict[Path, _Report] = {}
        self._making = False

    def page(self, path: Path) -> str | None:
        """Return the report of a run for its current files; None: it is being made, ask again.

        Raises:
            UserError: it cannot be made.
        """
        stamp = _stamp(path)
        with self._lock:
            report = self._made.get(path)
            if report is not None and (report.stamp == stamp or not self._making):
                # The report of an active run is outdated at once: return it, and make a new one at
                # the next request.
                del self._made[path]
                if report.problem:
                    raise UserError(report.problem)
                if report.stamp == stamp:
                    self._made[path] = report
                return report.page
            if not self._making:
                self._making = True
                Thread(target=self._make, args=(path, stamp), daemon=True).start()
        return None

    def _make(self, path: Path, stamp: tuple[float, ...]) -> None:
        report = _Report(stamp)
        try:
            from hvdtrain.report.figures import figures
            from hvdtrain.report.page import one
            from hvdtrain.report.run import read

            run = read(path)
            report.page = one(run, figures(run))
        except UserError as error:
            report.problem = str(error)
        except Exception as error:
            # Files may be damaged, or change while they are read.
            report.problem = f"the report of {path.name} cannot be made ({error!r})"
        with self._lock:
            self._making = False
            self._made[path] = report
            while len(self._made) > _KEPT:
                del self._made[next(iter(self._made))]


def _stamp(path: Path) -> tuple[float, ...]:
    """Value that changes when a file of the run changes."""
    names = ("metrics.jsonl", "events.jsonl", "ranks.jsonl", "manifest.json")
    files = [path / name for name in names]
    return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)
