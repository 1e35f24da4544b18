"""Text for people: tables, counts, and what a terminal can show."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence


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
