"""Difference of each layout's curve from its reference, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median
from typing import Any

from hvdtrain.bench.report import machine


@dataclass(frozen=True)
class Curve:
    """Curve of a run.

    Args:
        losses: loss of each step.
        norms: gradient norm of each step, before clipping.
        validation: loss of each evaluation.
        seconds: time of each step.
    """

    losses: Sequence[float]
    norms: Sequence[float]
    validation: Sequence[float]
    seconds: Sequence[float]


@dataclass(frozen=True)
class Row:
    """A layout.

    Args:
        name: such as "data 2 x tensor 2"
        ranks: its number of ranks
        found: its curve, or the reason for its failure
        wanted: the reference curve; None: there is none either
        aim: allowed relative difference; 0: bitwise identical
    """

    name: str
    ranks: int
    found: Curve | str
    wanted: Curve | None
    aim: float

    def differences(self) -> dict[str, float]:
        """Return the largest differences of losses, norms and validation losses; infinite without a
        curve."""
        names = ("losses", "norms", "validation")
        found, wanted = self.found, self.wanted
        if isinstance(found, str) or wanted is None:
            return dict.fromkeys(names, inf)
        return {name: _largest(getattr(found, name), getattr(wanted, name)) for name in names}

    @property
    def met(self) -> bool:
        """Whether the limit is met. Norms are included, because shards that count twice show in
        them."""
        return max(self.differences().values()) <= self.aim

    def to_dict(self) -> dict[str, Any]:
        failed = self.found if isinstance(self.found, str) else None
        near = {
            key: value if isfinite(value) else None for key, value in self.differences().items()
        }
        return {
            "layout": self.name,
            "ranks": self.ranks,
            **near,
            "aim": self.aim,
            "met": self.met,
            "step_seconds": None if failed else median(self.found.seconds),  # type: ignore[union-attr]
            "failed": failed,
        }


@dataclass(frozen=True)
class LayoutsReport:
    """Results.

    Args:
        rows: one row per layout
        facts: additional facts
    """

    rows: Sequence[Row]
    facts: Mapping[str, Any]

    @property
    def met(self) -> bool:
        """Whether all limits are met."""
        return all(row.met for row in self.rows)

    def to_json(self) -> str:
        rows = [row.to_dict() for row in self.rows]
        content = {"benchmark": "layouts", **self.facts, "machine": machine(), "rows": rows}
        return json.dumps(content, indent=1)

    def to_table(self) -> str:
        head = ("layout", "ranks", "losses", "norms", "validation", "aim", "", "ms/step")
        table = [head, *map(_cells, self.rows)]
        widths = [max(len(row[column]) for row in table) for column in range(len(head))]
        lines = []
        for name, *cells in table:
            right = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *right]).rstrip())
        lines += [f"{r.name}: {r.found}" for r in self.rows if isinstance(r.found, str)]
        facts = [f"{name.replace('_', ' ')}: {value}" for name, value in self.facts.items()]
        missed = sum(not row.met for row in self.rows)
        facts.append(f"{len(self.rows)} layouts, {missed or 'none'} missed the aim")
        return "\n".join([*lines, ", ".join(facts)])


def _cells(row: Row) -> tuple[str, ...]:
    found = row.to_dict()
    near = [_number(found[name]) for name in row.differences()]
    seconds = found["step_seconds"]
    return (
        row.name,
        str(row.ranks),
        *near,
        f"{row.aim:g}" if row.aim else "bitwise",
        "met" if row.met else "MISSED",
        "-" if seconds is None else f"{1000 * seconds:.0f}",
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1e}" if value else "0"


def _largest(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the relative difference of a pair; infinite if their lengths differ."""
    if len(found) != len(wanted):
        return inf
    differences = (abs(a - b) / abs(b) if b else abs(a) for a, b in zip(found, wanted, strict=True))
    return max((d if isfinite(d) else inf for d in differences), default=0.0)
