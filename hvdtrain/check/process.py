"""Runs of a check: each has a time limit, and leaves no process."""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = (
    36  # https://man7.org/linux/man-pages/man2/PR_SET_CHILD_SUBREAPER.2const.html
)
_TICK_SECONDS = 0.1
_TERM_SECONDS = 10.0
_KILL_SECONDS = 5.0


def finish(argv: Sequence[str], env: Mapping[str, str], output: Path, seconds: float) -> int | None:
    """Run a command with its output in a file; return its exit code, None after `seconds`.

    No process of it is left, including those in other sessions.
    """
    with _descendants_end(), output.open("wb") as file:
        # However this process ends, the kernel then ends the launcher, and the launcher its ranks.
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", "--", *argv],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + seconds
        while (code := process.poll()) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(_TICK_SECONDS)
        return code


@contextmanager
def _descendants_end() -> Iterator[None]:
    """End all processes that are started in the block, also if their parents have ended.

    Orphans become children of this process, which therefore finds them.
    """
    libc, this = ctypes.CDLL(None), psutil.Process()
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    before = set(this.children(recursive=True))
    try:
        yield
    finally:
        for end, seconds in (
            (psutil.Process.terminate, _TERM_SECONDS),
            (psutil.Process.kill, _KILL_SECONDS),
        ):
            left = [p for p in this.children(recursive=True) if p not in before]
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    end(process)
            psutil.wait_procs(left, seconds)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
