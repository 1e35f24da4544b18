"""Text for people: tables, counts, what a terminal can show; and numbers for JSON."""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Sequence
from typing import Any


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


def plural(count: int, thing: str) -> str:
    """Format a count, such as 1 rank or 1,024 ranks."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


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
