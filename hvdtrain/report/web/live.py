"""Data of a run's page, updated from its files; a refresh reads only what is new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvdtrain.report.web.overview import Overview
from hvdtrain.report.web.series import Series
from hvdtrain.report.web.tail import News, Tail
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.untrusted import number, whole

_OVER_STEPS = ("loss", "validation_loss", "samples_per_second", "step_seconds")
_VALIDATION = "validation_"
RANKS = 64  # limit for the plot of the ranks' phases: those with the lowest scores


class LiveRun:
    """A run that is being viewed.

    Args:
        path: RUN.
    """

    def __init__(self, path: Path) -> None:
        directory = RunDirectory(path)
        self._overview = Overview(path)
        self._metrics, self._ranks = Tail(directory.metrics), Tail(directory.ranks)
        self._forget_metrics()
        self._forget_ranks()

    def _forget_metrics(self) -> None:
        self._series = {name: Series() for name in _OVER_STEPS}
        self._validation: dict[str, float] = {}
        self._torn = 0

    def _forget_ranks(self) -> None:
        self._exposed, self._score = Series(), Series()
        self._window: dict[str, Any] = {}

    def refresh(self) -> dict[str, Any]:
        """Read new content of the files, at most a few MiB, and return the data of the page.

        Raises:
            OSError: a file cannot be read.
        """
        self._overview.refresh()
        metrics, ranks = self._metrics.read(), self._ranks.read()
        self._take_metrics(metrics)
        self._take_ranks(ranks)
        return {
            **self._overview.row(),
            "restarted": list(self._overview.restarts),
            "named_slow": list(self._overview.slow.values()),
            "validation": self._validation,
            "torn": self._torn,
            "unread_bytes": self._overview.reading + metrics.left + ranks.left,
            "series": {
                **{name: series.points() for name, series in self._series.items()},
                "exposed": self._exposed.points(),
                "score": self._score.points(),
            },
            "window": self._shown_window(),
        }

    def _take_metrics(self, news: News) -> None:
        if news.restarted:
            self._forget_metrics()
        self._torn += news.torn
        for line in news.lines:
            step = whole(line.get("step"))
            if step is None:
                continue
            for name, series in self._series.items():
                value = number(line.get(name))
                if value is not None:
                    series.add(step, value)
            for name, found in line.items():
                value = number(found)
                if name.startswith(_VALIDATION) and value is not None:
                    self._validation[name.removeprefix(_VALIDATION)] = value

    def _take_ranks(self, news: News) -> None:
        if news.restarted:
            self._forget_ranks()
        for line in news.lines:
            step, phases, score = whole(line.get("step")), _phases(line), _row(line.get("score"))
            if step is None or not phases:
                continue
            total = sum(map(sum, phases.values()))
            if total > 0:
                self._exposed.add(step, sum(phases.get("comm_exposed", [])) / total)
            if score:
                self._score.add(step, min(score))
            self._window = {
                "step": step,
                "steps": whole(line.get("steps")) or 1,
                "phases": phases,
                "score": score,
                "host_memory_bytes": _row(line.get("host_memory_bytes")),
                "device_memory_bytes": _row(line.get("device_memory_bytes")),
            }

    def _shown_window(self) -> dict[str, Any] | None:
        """Milliseconds per step in each phase of each rank, from the last line of ranks.jsonl."""
        window = self._window
        if not window:
            return None
        phases: dict[str, list[float]] = window["phases"]
        count = len(next(iter(phases.values())))
        score = window["score"] if len(window["score"]) == count else [1.0] * count
        slowest = sorted(range(count), key=score.__getitem__)[:RANKS]
        return {
            "step": window["step"],
            "steps": window["steps"],
            "phases": list(phases),
            "all_ranks": count,
            "ranks": [
                {
                    "rank": rank,
                    "host": self._overview.host(rank),
                    "milliseconds": [
                        round(seconds[rank] / window["steps"] * 1e3, 4)
                        for seconds in phases.values()
                    ],
                    "score": round(score[rank], 4),
                    "host_memory_bytes": _of(window["host_memory_bytes"], rank),
                    "device_memory_bytes": _of(window["device_memory_bytes"], rank),
                }
                for rank in sorted(slowest)
            ],
        }


def _phases(line: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of each phase on each rank; {} if the line is not in the format of a run."""
    found = line.get("phases")
    if not isinstance(found, dict):
        return {}
    phases = {str(name): _row(values) for name, values in found.items()}
    lengths = {len(values) for values in phases.values()}
    return phases if len(lengths) == 1 and lengths != {0} else {}


def _row(values: object) -> list[float]:
    """A number for each rank; [] if any is not a number."""
    row = [number(value) for value in values] if isinstance(values, list) else []
    known = [value for value in row if value is not None]
    return known if len(known) == len(row) else []


def _of(values: list[float], rank: int) -> float | None:
    return values[rank] if rank < len(values) else None
