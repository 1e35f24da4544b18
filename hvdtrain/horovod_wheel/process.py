"""Run a long command with a log file and a time limit, leaving no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.errors import EXIT_CRASH, UserError

REPORT_EVERY_S = 30.0
END_GRACE_S = 10.0


class BuildError(UserError):
    """Failure to compile, download or install Horovod."""

    exit_code = EXIT_CRASH


class TimedOutError(UserError):
    """A command exceeded its time limit."""

    exit_code = EXIT_CRASH


def run_logged(
    command: Sequence[str],
    log: Path,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    verbose: bool = False,
    progress: bool = False,
) -> int:
    """Run `command` with stdout and stderr in `log`; return its exit code.

    `timeout` is in seconds; `verbose` copies the output to stderr; `progress` reports make's
    progress every half minute. Raises TimedOutError, after which no process of the command is
    left.
    """
    started = reported = time.monotonic()
    with log.open("wb") as out, log.open("rb") as written:
        # A separate session, so that cmake, make and the compilers end with pip.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            while True:
                code = _wait(process, 0.5)
                if verbose:
                    sys.stderr.write(written.read().decode(errors="replace"))
                if code is not None:
                    return code
                now = time.monotonic()
                if now - started > timeout:
                    raise TimedOutError(
                        f"{command[0]} took more than {timeout:.0f} s: {_tail(log)}"
                    )
                if progress and not verbose and now - reported >= REPORT_EVERY_S:
                    reported = now
                    say(f"{_percent(log)}{now - started:.0f} s")
        finally:
            if process.poll() is None:
                _end(process)


def pip(action: str, dependencies: bool = False) -> list[str]:
    """Start of a non-interactive command of this environment's pip."""
    return [
        sys.executable,
        "-m",
        "pip",
        action,
        "--no-input",
        *([] if dependencies else ["--no-deps"]),
    ]


def say(line: str) -> None:
    """Print a progress message of the build to stderr."""
    print(f"hvdtrain: {line}", file=sys.stderr, flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    # SIGTERM first: a launcher then ends its ranks, which are in other sessions.
    for ending in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, ending)
        if _wait(process, END_GRACE_S) is not None:
            return


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _percent(log: Path) -> str:
    found = re.findall(r"^\s*\[ *(\d+)%\]", log.read_text(errors="replace"), re.MULTILINE)
    return f"{found[-1]}%, " if found else ""


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
