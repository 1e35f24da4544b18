"""`hvdtrain bench allreduce`: bandwidth of Horovod, compared with MPI and with torch's gloo.

Algorithm and bus bandwidth are defined as in nccl-tests
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from hvdtrain.bench.processes import launch, measure, on_threads
from hvdtrain.bench.report import load, machine
from hvdtrain.errors import UserError
from hvdtrain.launch import mpi as launcher
from hvdtrain.launch.hostfile import parse_hosts
from hvdtrain.text import aligned

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_ELEMENT_BYTES = 4
MPI = "MPI_Allreduce"
TORCH_GLOO = "torch gloo"
_REFERENCES = (MPI, TORCH_GLOO)
_AIM_SIZE, _AIM = 32 << 20, 0.9  # fraction of MPI_Allreduce's bus bandwidth


class _Contender(NamedTuple):
    name: str
    launcher: str  # see `launch`
    kind: str  # see allreduce_worker.py


_CONTENDERS = (
    _Contender("Horovod, Gloo", "gloo", "horovod"),
    _Contender("Horovod, MPI", "mpi", "horovod"),
    _Contender("Horovod, Gloo, hierarchical", "gloo", "horovod-hierarchical"),
    _Contender("Horovod, MPI, hierarchical", "mpi", "horovod-hierarchical"),
    _Contender("Horovod, NCCL", "gloo", "horovod-gpu"),
    _Contender(MPI, "mpi", "mpi"),
    _Contender(TORCH_GLOO, "gloo", "torch-gloo"),
)


def parse_sizes(text: str) -> list[int]:
    """Parse `1K,64K,32M` into bytes, each size once, smallest first; K, M, G are powers of 1024.

    Raises:
        UserError: names the size that is wrong.
    """
    sizes = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)([KMG]?)B?", part.strip().upper())
        size = int(match[1]) * _UNITS[match[2]] if match else 0
        if size < _ELEMENT_BYTES or size % _ELEMENT_BYTES or size > 2 << 30:
            raise UserError(
                f"--sizes: invalid size {part.strip()!r}; sizes of float32 buffers are multiples "
                f"of {_ELEMENT_BYTES} bytes up to 2G, such as 64K,1M,32M"
            )
        sizes.add(size)
    return sorted(sizes)


def allreduce(sizes: Sequence[int], rounds: int, np: int, hosts: str | None) -> AllreduceReport:
    """Measure the seconds of an all-reduce of each size, for each contender in turn.

    Args:
        hosts: "name:slots,name:slots" with `np` slots; default: this host.

    Raises:
        UserError: Horovod was built with neither Gloo nor MPI, or a launcher is missing.
        BenchError: ranks failed.
    """
    left_out = missing_contenders()
    several = _equal_and_several(hosts)
    present = [
        one
        for one in _CONTENDERS
        if one.name not in left_out and (several or one.kind != "horovod-hierarchical")
    ]
    if not any(one.kind.startswith("horovod") for one in present):
        raise UserError("; ".join(f"{name}: {why}" for name, why in left_out.items()))
    seconds: dict[str, dict[int, list[float]]] = {
        one.name: {size: [] for size in sizes} for one in present
    }
    for number in range(rounds):
        for one in present[:: -1 if number % 2 else 1]:  # alternate the order
            for size, value in _measure(one, sizes, np, hosts).items():
                seconds[one.name][size].append(value)
    return AllreduceReport(np, hosts or f"localhost:{np}", seconds, left_out)


def _equal_and_several(hosts: str | None) -> bool:
    """Whether there are several hosts with the same number of ranks, more than one each."""
    slots = {host.slots for host in parse_hosts(hosts)} if hosts else {1}
    return len(slots) == 1 and slots != {1} and hosts is not None and "," in hosts


def missing_contenders() -> dict[str, str]:
    """Contenders that cannot be measured on this host: name -> reason."""
    from hvdtrain.runtime.init import built_with

    built = built_with()
    mpirun = launcher.problem()
    mpi4py = "" if importlib.util.find_spec("mpi4py") else "mpi4py is not installed"
    gloo = "" if built["gloo"] else "Horovod was built without Gloo"
    mpi = "" if built["mpi"] else "Horovod was built without MPI"
    why = {
        "Horovod, Gloo": gloo,
        "Horovod, MPI": mpi or mpirun,
        "Horovod, Gloo, hierarchical": gloo,
        "Horovod, MPI, hierarchical": mpi or mpirun,
        "Horovod, NCCL": gloo or _why_no_nccl(built),
        MPI: mpi4py or mpirun,
        TORCH_GLOO: gloo,
    }
    return {name: reason for name, reason in why.items() if reason}


def _why_no_nccl(built: Mapping[str, bool]) -> str:
    import torch

    if not built["nccl"]:
        return "Horovod was built without NCCL"
    return "" if torch.cuda.is_available() else "this host has no GPU"


def _measure(one: _Contender, sizes: Sequence[int], np: int, hosts: str | None) -> dict[int, float]:
    command = [sys.executable, "-m", "hvdtrain.bench.allreduce_worker", one.kind]
    command += map(str, sizes)
    result = measure(launch(one.launcher, np, on_threads(1, command), hosts))
    return {int(size): float(value) for size, value in result["seconds"].items()}


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
        # The names of the sides, and the ratios, which may have a verdict
        text = aligned(lines, left=(1, *range(7, len(lines[0]))))
        text += [f"{side}: omitted, {why}" for side, why in self.left_out.items()]
        text.append(f"{self.ranks} ranks ({self.hosts}), {load()}")
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


def _size(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"
