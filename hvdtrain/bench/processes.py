"""Start a measured process, alone or as ranks, and read its results."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.errors import EXIT_CRASH, EXIT_USER, UserError
from hvdtrain.horovod_wheel.process import run_logged
from hvdtrain.launch.commands import horovodrun, mpirun, mpirun_with_failure_detection
from hvdtrain.launch.hostfile import as_text, first_slots, parse_hosts, total_slots

MARK = '{"measured": '  # prefix of a worker's result line
LIMIT_S = 1800.0
# Omit what is not part of a plain step; the exporter, which is part, listens on this host only.
QUIET = ("--eval.every=0", "--checkpoint.every=0", "--telemetry.host=127.0.0.1")


class BenchError(UserError):
    """Failure of a measured process; the exit code is 2 if its flags or input were wrong."""

    def __init__(self, message: str, exit_code: int = EXIT_CRASH) -> None:
        super().__init__(message)
        self.exit_code = EXIT_USER if exit_code == EXIT_USER else EXIT_CRASH


def worker(kind: str, steps: int, flags: Sequence[str], rounds: int = 1) -> list[str]:
    """Command line of a measured process; see worker.py."""
    return [sys.executable, "-m", "hvdtrain.bench.worker", kind, str(steps), str(rounds), *flags]


def on_threads(threads: int, command: Sequence[str]) -> list[str]:
    """`command` with `threads` OpenMP threads, on any host where a launcher starts it."""
    return ["env", f"OMP_NUM_THREADS={threads}", *command]


def launch(
    launcher: str, ranks: int, command: Sequence[str], hosts: str | None = None
) -> list[str]:
    """`command` under a launcher: gloo (horovodrun) or mpi (mpirun).

    Args:
        hosts: "name:slots,name:slots"; default: this host.
    """
    if launcher == "gloo":
        return horovodrun(ranks, command, hosts)
    return mpirun_with_failure_detection(ranks, command, hosts) if hosts else mpirun(ranks, command)


def choose_hosts(text: str, np: int) -> str:
    """Return the first `np` slots of "name:slots,name:slots".

    Raises:
        UserError: there are fewer slots, or the text is invalid.
    """
    hosts = parse_hosts(text)
    if (slots := total_slots(hosts)) < np:
        raise UserError(f"--hosts {text} provides {slots} of the {np} slots that --np requires")
    return as_text(first_slots(hosts, np))


def measure(command: Sequence[str]) -> dict[str, Any]:
    """Run a command and return the result that its worker printed.

    Raises:
        BenchError: the command failed.
        TimedOutError: it took more than LIMIT_S.
    """
    lines = finish(command)
    for line in lines:
        if MARK in line:  # horovodrun prefixes the rank
            return json.loads(line[line.index(MARK) :])
    raise _failed(command, 0, lines)


def finish(command: Sequence[str], limit: float = LIMIT_S) -> list[str]:
    """Run a command and return the lines of its output.

    Args:
        limit: time limit in seconds.

    Raises:
        BenchError: the command failed.
        TimedOutError: it took more than `limit`.
    """
    code, lines = attempt(command, limit)
    if code != 0:
        raise _failed(command, code, lines)
    return lines


def attempt(command: Sequence[str], limit: float = LIMIT_S) -> tuple[int, list[str]]:
    """Like `finish` for a command that may fail: return (exit code, lines of output)."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "output")
        try:
            code = run_logged(command, log, limit)
        except OSError as error:
            raise BenchError(f"cannot start {command[0]}: {error.strerror}") from None
        return code, log.read_text(errors="replace").splitlines()


def _failed(command: Sequence[str], code: int, lines: Sequence[str]) -> BenchError:
    end = "\n".join(line for line in lines[-15:] if line.strip())
    return BenchError(f"{' '.join(command)} ended with {code}:\n{end}", code)
