"""Standard streams that may be closed, without a reader, or on a full disk: no run ends by it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def open_missing() -> None:
    """Open /dev/null in place of each standard stream that is closed, such as by `2>&-`.

    Python sets it to None. The next file that is opened would get its number, and whatever
    libraries print.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115


def flush() -> None:
    """Flush stdout and stderr, and drop what cannot be written: Python would end with code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # also closed, or None
            with suppress(OSError, ValueError, AttributeError):  # it has no descriptor
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                stream.flush()


def say(line: str) -> None:
    """Print a line on stderr if that is possible."""
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
