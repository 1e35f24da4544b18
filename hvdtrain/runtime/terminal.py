"""The terminal that shows this process's output: its own, or its launcher's."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import TextIO

import psutil

from hvdtrain.runtime.environment import launched_size


@cache
def terminal() -> TextIO | None:
    """Return a terminal for a progress bar; None: stderr goes to a file or another program.

    A launcher gives its ranks pipes. If it reads them on this host, and its own stderr is a
    terminal, return that terminal, to write to it directly without the launcher's prefixes.
    """
    if sys.stderr.isatty():
        return sys.stderr
    path = _launchers_stderr() if launched_size() is not None else None
    if path is None:
        return None
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY)
    except OSError:
        return None
    if os.isatty(descriptor):
        return open(descriptor, "w", encoding="utf-8", errors="replace", buffering=1)
    os.close(descriptor)
    return None


def _launchers_stderr() -> Path | None:
    """Return the stderr of the ancestor that reads this process's stderr, if a character device.

    Pipes and files must not be opened a second time: a pipe's reader would not see its end, and
    two writers of a file would overwrite each other.
    """
    try:
        pipe = os.readlink("/proc/self/fd/2")
        if not pipe.startswith("pipe:"):
            return None
        for ancestor in psutil.Process().parents():
            directory = Path(f"/proc/{ancestor.pid}")
            if _reads(directory, pipe):
                stderr = directory / "fd/2"
                return stderr if stderr.is_char_device() else None
    except (OSError, psutil.Error):
        pass  # another user's process, or gone
    return None


def _reads(process: Path, pipe: str) -> bool:
    """Whether a process (/proc/ID) holds the read end of a pipe."""
    for descriptor in (process / "fd").iterdir():
        try:
            if os.readlink(descriptor) != pipe:
                continue
            facts = (process / "fdinfo" / descriptor.name).read_text()
        except OSError:
            continue
        flags = next(line for line in facts.splitlines() if line.startswith("flags:"))
        if int(flags.split()[1], 8) & os.O_ACCMODE == os.O_RDONLY:
            return True
    return False
