"""Output of the ranks on the driver's own output, which is queued (runtime/queued_output.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable


def rank_prefix(number: int, stream: str, line: str) -> str:
    """Return a rank's name for a line that does not name its rank; rank 0's lines have none.

    Args:
        number: number of the process.
        stream: "stdout" or "stderr".
    """
    named = number == 0 or (stream == "stderr" and line.startswith("hvdtrain: "))
    return "" if named else f"[{number}]<{stream}>:"


def show(
    number: int,
    stream: str,
    text: str,
    prefix: Callable[[int, str, str], str] = rank_prefix,
    copy: Callable[[int, str, str], None] = lambda *_: None,
) -> None:
    """Print lines of a process.

    Args:
        stream: "stdout" or "stderr".
        prefix: returns what precedes a line, given (process number, stream, line).
        copy: called with (process number, stream, text with prefixes).
    """
    text = "".join(prefix(number, stream, line) + line for line in text.splitlines(keepends=True))
    (sys.stdout if stream == "stdout" else sys.stderr).write(text)
    copy(number, stream, text)
