"""Bandwidths of an all-reduce, as a table or as JSON.

Algorithm and bus bandwidth are defined as in nccl-tests
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hvdtrain.bench.report import machine

MPI = "MPI_Allreduce"
TORCH_GLOO = "torch gloo"
_REFERENCES = (MPI, TORCH_GLOO)
_AIM_SIZE, _AIM = 32 << 20, 0.9  # fraction of MPI_Allreduce's bus bandwidth


def algorithm_bandwidth(size: int, seconds: float) -> float:
    """Bytes per second: buffer size / time."""
    return size / seconds


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes per second that each rank must at least send, whatever the algorithm.

    Each rank sends 2 (n - 1) / n of the buffer, so this compares with the network speed for any n.
    """
    return algorithm_bandwidth(size, seconds) * 2 * (ranks - 1) / ranks


@dataclass(frozen=True)
class AllreduceReport:
    """Results of the measurement.

    Args:
        ranks: number of ranks that took part.
        hosts: their hosts, as "name:slots,name:slots".
        seconds: side -> buffer size in bytes -> one value per round.
        left_out: sides that could not be measured -> reason.
    """

    ranks: int
    hosts: str
    seconds: Mapping[str, Mapping[int, Sequence[float]]]
    left_out: Mapping[str, str]

    def rows(self) -> list[dict[str, Any]]:
        """One row per size and side; bandwidths in GB/s (1e9 bytes)."""
        sizes = sorted({size for by_size in self.seconds.values() for size in by_size})
        return [self._row(side, size) for size in sizes for side in self.seconds]

    def bus_bandwidths(self) -> dict[str, dict[int, float]]:
        """Bus bandwidth in GB/s: side -> buffer size in bytes -> value."""
        found: dict[str, dict[int, float]] = {side: {} for side in self.seconds}
        for row in self.rows():
            found[row["side"]][row["bytes"]] = row["busbw_gb_per_s"]
        return found

    def to_json(self) -> str:
        content = {
            "benchmark": "allreduce",
            "ranks": self.ranks,
            "hosts": self.hosts,
            "machine": machine(),
            "left_out": dict(self.left_out),
            "rows": self.rows(),
        }
        return json.dumps(content, indent=1)

    def to_table(self) -> str:
        head = ["size", "", "median", "min", "max", "algbw", "busbw"]
        lines = [[*head, *(f"/ {side}" for side in self._references())]]
        lines.append(["", "", *["us"] * 3, *["GB/s"] * 2, *["x"] * len(self._references())])
        before = 0
        for row in self.rows():
            size = _size(row["bytes"]) if row["bytes"] != before else ""
            before = row["bytes"]
            times = [f"{row[key] * 1e6:.0f}" for key in ("seconds", "min_seconds", "max_seconds")]
            speeds = [f"{row[key]:.3g}" for key in ("algbw_gb_per_s", "busbw_gb_per_s")]
            of = [_ratio(row["of"].get(side), _verdict(row, side)) for side in self._references()]
            lines.append([size, row["side"], *times, *speeds, *of])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(_aligned(line, widths)).rstrip() for line in lines]
        text += [f"{side}: left out, {why}" for side, why in self.left_out.items()]
        here = machine()
        text.append(
            f"{self.ranks} ranks ({self.hosts}), load {here['load']:.1f} on {here['cores']} cores"
        )
        return "\n".join(text)

    def _references(self) -> list[str]:
        return [side for side in _REFERENCES if side in self.seconds]

    def _row(self, side: str, size: int) -> dict[str, Any]:
        values = self.seconds[side][size]
        seconds = median(values)
        of = {} if side in _REFERENCES else {s: self._of(side, s, size) for s in self._references()}
        aimed = size == _AIM_SIZE and MPI in of and not side.endswith("NCCL")
        return {
            "bytes": size,
            "side": side,
            "seconds": seconds,
            "min_seconds": min(values),
            "max_seconds": max(values),
            "algbw_gb_per_s": algorithm_bandwidth(size, seconds) / 1e9,
            "busbw_gb_per_s": bus_bandwidth(size, seconds, self.ranks) / 1e9,
            "of": of,
            "aim": f">= {_AIM} x {MPI}" if aimed else None,
            "met": of[MPI] >= _AIM if aimed else None,
        }

    def _of(self, side: str, other: str, size: int) -> float:
        """Ratio of bus bandwidths: the median over pairs of measurements adjacent in time."""
        turns = zip(self.seconds[side][size], self.seconds[other][size], strict=True)
        return median(theirs / own for own, theirs in turns)


def _verdict(row: Mapping[str, Any], side: str) -> str:
    if side != MPI or row["met"] is None:
        return ""
    return f" >= {_AIM} {'met' if row['met'] else 'MISSED'}"


def _ratio(value: float | None, verdict: str) -> str:
    return "" if value is None else f"{value:.2f}{verdict}"


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Align sizes and numbers right; align names and ratios, which may have a verdict, left."""
    return [
        text.ljust(width) if number == 1 or number > 6 else text.rjust(width)
        for number, (text, width) in enumerate(zip(line, widths, strict=True))
    ]


def _size(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"
