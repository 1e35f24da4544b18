"""Numbers formatted for people."""

from __future__ import annotations

import math

UNKNOWN = "–"


def number(value: float | None, digits: int = 4) -> str:
    """Format a number, such as 0.4297 or 12.3e6."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.{digits}g}" if abs(value) < 1e4 else f"{value:,.0f}"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def seconds(value: float | None) -> str:
    """Format a duration, such as 12.3 ms, 4.5 s, 3 min 20 s, 5 h 12 min or 3 d 4 h."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    whole = round(value)
    for size, name, small, small_name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // small} {small_name}"
    raise AssertionError(value)


def size(value: float | None) -> str:
    """Format bytes, such as 1.5 GiB."""
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def bandwidth(value: float | None) -> str:
    """Format bytes per second, in the decimal units of networks."""
    return _scaled(value, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def _scaled(value: float | None, base: int, names: tuple[str, ...]) -> str:
    if value is None:
        return UNKNOWN
    power = 0
    while value >= base and power < len(names) - 1:
        value, power = value / base, power + 1
    return f"{value:.3g} {names[power]}"


def ranks(numbers: list[int]) -> str:
    """Format ranks, such as "0-3, 6"."""
    pieces: list[list[int]] = []
    for rank in sorted(numbers):
        if pieces and rank == pieces[-1][-1] + 1:
            pieces[-1].append(rank)
        else:
            pieces.append([rank])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in pieces)
