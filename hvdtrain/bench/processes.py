"""Starting a measured process, alone or as ranks, and reading what it measured."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.errors import EXIT_CRASH, EXIT_USER, UserError
from hvdtrain.horovod_wheel.process import run_logged
from hvdtrain.launch.commands import horovodrun, mpirun, mpirun_that_notices
from hvdtrain.launch.hostfile import as_text, first_slots, parse_hosts, total_slots

MARK = '{"measured": '  # with which the line of a worker begins
LIMIT_S = 1800.0
# Not part of a plain step; the exporter, which is, listens on this machine alone.
QUIET = ("--eval.every=0", "--checkpoint.every=0", "--telemetry.host=127.0.0.1")


class BenchError(UserError):
    """A measured process failed; the exit code is 2 where its flags or input were wrong."""

    def __init__(self, message: str, exit_code: int = EXIT_CRASH) -> None:
        super().__init__(message)
        self.exit_code = EXIT_USER if exit_code == EXIT_USER else EXIT_CRASH


def worker(kind: str, steps: int, flags: Sequence[str], rounds: int = 1) -> list[str]:
    """Command line of a measured process; see worker.py."""
    return [sys.executable, "-m", "hvdtrain.bench.worker", kind, str(steps), str(rounds), *flags]


def on_threads(threads: int, command: Sequence[str]) -> list[str]:
    """`command` with so many threads, on whatever host a launcher starts it."""
    return ["env", f"OMP_NUM_THREADS={threads}", *command]


def launch(
    launcher: str, ranks: int, command: Sequence[str], hosts: str | None = None
) -> list[str]:
    """`command` under a launcher: gloo (horovodrun) or mpi (mpirun).

    Args:
        hosts: "name:slots,name:slots"; default: this one.
    """
    if launcher == "gloo":
        return horovodrun(ranks, command, hosts)
    return mpirun_that_notices(ranks, command, hosts) if hosts else mpirun(ranks, command)


def choose_hosts(text: str, np: int) -> str:
    """The first `np` slots of "name:slots,name:slots".

    Raises:
        UserError: they are not that many, or the text is something else.
    """
    hosts = parse_hosts(text)
    if (slots := total_slots(hosts)) < np:
        raise UserError(f"--hosts {text} has {slots} of the slots that --np {np} takes")
    return as_text(first_slots(hosts, np))


def measure(command: Sequence[str]) -> dict[str, Any]:
    """Runs a command and returns what its worker printed.

    Raises:
        BenchError: it failed.
        TimedOutError: it took more than LIMIT_S.
    """
    lines = finish(command)
    for line in lines:
        if MARK in line:  # horovodrun puts the rank before it
            return json.loads(line[line.index(MARK) :])
    raise _failed(command, 0, lines)


def finish(command: Sequence[str], limit: float = LIMIT_S) -> list[str]:
    """Runs a command and returns the lines of its output.

    Args:
        limit: seconds.

    Raises:
        BenchError: it failed.
        TimedOutError: it took more than `limit`.
    """
    code, lines = attempt(command, limit)
    if code != 0:
        raise _failed(command, code, lines)
    return lines


def attempt(command: Sequence[str], limit: float = LIMIT_S) -> tuple[int, list[str]]:
    """As `finish`, of a command that may fail: (its exit code, the lines of its output)."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "output")
        try:
            code = run_logged(command, log, limit)
        except OSError as error:
            raise BenchError(f"cannot start {command[0]}: {error.strerror}") from None
        return code, log.read_text(errors="replace").splitlines()


def _failed(command: Sequence[str], code: int, lines: Sequence[str]) -> BenchError:
    end = "\n".join(line for line in lines[-15:] if line.strip())
    return BenchError(f"{' '.join(command)} ended with {code}:\n{end}", code)
