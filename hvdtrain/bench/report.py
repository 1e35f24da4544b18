"""Results of a benchmark, as a table or as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hvdtrain.text import aligned


def machine() -> dict[str, float]:
    """Number of cores that this process may use, and the 1-minute load average."""
    return {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}


def load() -> str:
    """Describe the load of this machine."""
    here = machine()
    return f"load {here['load']:.1f} on {here['cores']} cores"


@dataclass
class BenchMetric:
    """A quantity that was measured several times.

    Args:
        name: description of the quantity
        unit: unit of the values; "x" for ratios
        values: one per round
        at_least, at_most: target, if there is one
    """

    name: str
    unit: str
    values: Sequence[float]
    at_least: float | None = None
    at_most: float | None = None

    def summary(self) -> dict[str, Any]:
        """Name, unit, median, min, max; aim and whether the median met it, or None for both."""
        middle, aim, met = median(self.values), None, None
        if self.at_least is not None:
            aim, met = f">= {self.at_least:g}", middle >= self.at_least
        if self.at_most is not None:
            aim, met = f"<= {self.at_most:g}", middle <= self.at_most
        return {
            "name": self.name,
            "unit": self.unit,
            "median": middle,
            "min": min(self.values),
            "max": max(self.values),
            "aim": aim,
            "met": met,
        }


@dataclass
class Report:
    """Results of a benchmark.

    Args:
        benchmark: its name
        metrics: the measured quantities
        facts: other results, such as {"bit_identical": True}
    """

    benchmark: str
    metrics: list[BenchMetric]
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        content = {
            "benchmark": self.benchmark,
            **self.facts,
            "machine": machine(),
            "figures": [metric.summary() for metric in self.metrics],
        }
        return json.dumps(content, indent=1)

    def to_table(self) -> str:
        rows = [["", "median", "min", "max", "", "aim"]]
        for metric in self.metrics:
            s = metric.summary()
            aim = "" if s["aim"] is None else f"{s['aim']} {'met' if s['met'] else 'MISSED'}"
            numbers = [f"{s[key]:.4g}" for key in ("median", "min", "max")]
            rows.append([s["name"], *numbers, s["unit"], aim])
        facts = [f"{name.replace('_', ' ')}: {value}" for name, value in self.facts.items()]
        return "\n".join([*aligned(rows, left=(0, 4, 5)), ", ".join([*facts, load()])])
