"""Text for people: tables, counts, what a terminal can show; and numbers for JSON."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Container, Sequence
from typing import Any, TextIO


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """Lines of a table; columns are aligned right, except the columns `left`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def plural(count: int, thing: str, things: str = "") -> str:
    """Format a count, such as 1 rank or 1,024 ranks; `things`: a plural that does not end in s."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def short(value: float) -> str:
    """Format a quantity with three digits, such as 0.52, 975, 18.4k or 1.20M."""
    for unit in ("", "k", "M", "G"):
        # 999.5 would be rounded to a fourth digit.
        if abs(value) < 999.5 or unit == "G":
            break
        value /= 1000
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}{unit}"


def epochs(passes: float, samples: int) -> str:
    """Format passes over data, such as 0.60 epochs of 532 samples."""
    count = "<0.01" if 0 < passes < 0.005 else f"{passes:.2f}"
    return f"{count} epochs of {plural(samples, 'sample')}"


def duration(seconds: float) -> str:
    """Format a time such as 0:42, 1:05:07 or 3d 04:10."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def styled(text: str, style: str, stream: TextIO | None = None) -> str:
    """Return text with a style of rich, such as "bold red", if `stream` shows colors.

    Args:
        stream: default: stdout. A file, a pipe, a terminal without colors and one with NO_COLOR
            get the text unchanged.
    """
    stream = stream or sys.stdout
    if not stream.isatty() and "FORCE_COLOR" not in os.environ:
        return text
    # Few commands need rich, and its import takes 50 ms.
    from rich.console import COLOR_SYSTEMS, Console
    from rich.style import Style

    console = Console(file=stream, force_jupyter=False)
    if console.color_system is None or console.no_color:
        return text
    return Style.parse(style).render(text, color_system=COLOR_SYSTEMS[console.color_system])


def encodable(text: str) -> str:
    """Replace the characters that the standard output cannot encode."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def finite(value: Any) -> Any:
    """Replace non-finite values by None, because JSON has no number for them."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
