"""Data of a run's page, updated from its files; a refresh reads only what is new."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from hvdtrain.report.charts import DENSE, Points
from hvdtrain.report.metrics import RECENT, remaining_seconds
from hvdtrain.report.web.overview import News, Overview, Tail
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.untrusted import integer, number

BINS = 500
_OVER_STEPS = ("loss", "validation_loss", "samples_per_second", "step_seconds", "grad_norm", "lr")
_VALIDATION = "validation_"
RANKS = 64  # limit for the chart of the ranks' phases: those with the lowest scores


@dataclass
class _Bin:
    low: float
    high: float
    total: float
    count: int


class Series:
    """Smallest, mean and largest value in bins of equal numbers of steps.

    A bin is one step until there are more than 2 x BINS bins; then pairs of bins are merged.
    """

    def __init__(self) -> None:
        self._bins: dict[int, _Bin] = {}
        self._width = 1

    def add(self, step: int, value: float | None) -> None:
        """Add the value of a step; None interrupts the line."""
        new = _Bin(inf, -inf, 0.0, 0) if value is None else _Bin(value, value, value, 1)
        self._merge(step // self._width, new)
        while len(self._bins) > 2 * BINS:
            bins, self._bins = self._bins, {}
            self._width *= 2
            for place, found in bins.items():
                self._merge(place // 2, found)

    def _merge(self, place: int, new: _Bin) -> None:
        old = self._bins.get(place)
        if old is None:
            self._bins[place] = new
            return
        old.low, old.high = min(old.low, new.low), max(old.high, new.high)
        old.total += new.total
        old.count += new.count

    def points(self) -> Points:
        """x (steps), y (means) and, if steps share points, low and high; see `charts.Points`."""
        places = sorted(self._bins)
        bins = [self._bins[place] for place in places]
        if not any(found.count for found in bins):
            return {"x": [], "y": []}
        middle = (self._width - 1) / 2
        found: Points = {
            "x": [place * self._width + middle for place in places],
            "y": [_short(found.total / found.count) if found.count else None for found in bins],
        }
        if self._width > 1:
            found["low"] = [_short(found.low) if found.count else None for found in bins]
            found["high"] = [_short(found.high) if found.count else None for found in bins]
        return found


def _short(value: float) -> float:
    """Round to the digits that a chart shows."""
    return float(f"{value:.7g}")


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
        self._clock = Series()
        self._began: float | None = None  # time of the first start, or else of the first line
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def _forget_ranks(self) -> None:
        self._exposed, self._score = Series(), Series()
        self._window: dict[str, Any] = {}

    def refresh(self) -> dict[str, Any]:
        """Read new content of the files, at most a few MiB, and return the data of the pages.

        Raises:
            OSError: a file cannot be read.
        """
        self._overview.refresh()
        metrics, ranks = self._metrics.read(), self._ranks.read()
        self._add_metrics(metrics)
        self._add_ranks(ranks)
        row, clock = self._overview.row(), self._clock.points()
        running = row["state"] == "running"
        left = remaining_seconds([*self._recent], row["total_steps"]) if running else None
        return {
            **row,
            "remaining_seconds": left,
            "clock": {"step": clock["x"], "seconds": clock["y"]},
            "restarted": [
                {**restart, "at_seconds": self._since_start(restart["time"])}
                for restart in self._overview.restarts
            ],
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

    def _since_start(self, when: float | None) -> float | None:
        return None if when is None or self._began is None else when - self._began

    def _add_metrics(self, news: News) -> None:
        if news.restarted:
            self._forget_metrics()
        self._torn += news.torn
        for line in news.lines:
            step, when = integer(line.get("step")), number(line.get("time"))
            if step is None:
                continue
            if when is not None:
                if self._began is None:
                    began = self._overview.began
                    self._began = when if began is None else began
                self._clock.add(step, when - self._began)
                self._recent.append((step, when))
            for name, series in self._series.items():
                value = number(line.get(name))
                if value is not None or name in DENSE:
                    series.add(step, value)
            for name, found in line.items():
                value = number(found)
                if name.startswith(_VALIDATION) and value is not None:
                    self._validation[name.removeprefix(_VALIDATION)] = value

    def _add_ranks(self, news: News) -> None:
        if news.restarted:
            self._forget_ranks()
        for line in news.lines:
            step, phases, score = integer(line.get("step")), _phases(line), _row(line.get("score"))
            if step is None or not phases:
                continue
            total = sum(map(sum, phases.values()))
            several = len(next(iter(phases.values()))) > 1
            if several and total > 0:
                self._exposed.add(step, sum(phases.get("comm_exposed", [])) / total)
            if several and score:
                self._score.add(step, min(score))
            self._window = {
                "step": step,
                "steps": integer(line.get("steps")) or 1,
                "phases": phases,
                "score": score,
                "host_memory_bytes": _row(line.get("host_memory_bytes")),
                "device_memory_bytes": _row(line.get("device_memory_bytes")),
            }

    def _shown_window(self) -> dict[str, Any] | None:
        """Seconds per step in each phase of each rank, from the last line of ranks.jsonl."""
        window = self._window
        if not window:
            return None
        phases: dict[str, list[float]] = window["phases"]
        count = len(next(iter(phases.values())))
        score = window["score"] if len(window["score"]) == count else [1.0] * count
        slowest = sorted(sorted(range(count), key=score.__getitem__)[:RANKS])
        memory = window["device_memory_bytes"] if any(window["device_memory_bytes"]) else None
        return {
            "step": window["step"],
            "steps": window["steps"],
            "labels": [f"{rank} {self._overview.host(rank)}" for rank in slowest],
            "seconds": {
                name: [seconds[rank] / window["steps"] for rank in slowest]
                for name, seconds in phases.items()
            },
            "all_ranks": count,
            "most_memory_bytes": max(memory or window["host_memory_bytes"], default=None),
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
