"""Check the installed wheel: a real all-reduce of 2 ranks on each of its controllers."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path

from hvdtrain.errors import EXIT_CRASH, UserError
from hvdtrain.horovod_wheel.process import TimedOutError, run_logged
from hvdtrain.horovod_wheel.recipe import installed_version
from hvdtrain.launch.commands import horovodrun, mpirun
from hvdtrain.runtime.environment import YIELDING

RANKS = 2
TIMEOUT_S = 120.0
_WORKER = [sys.executable, "-m", "hvdtrain.horovod_wheel.worker"]
_BUILT = (
    "import horovod.torch as h; print('built:', 'gloo' * h.gloo_built(), 'mpi' * h.mpi_built())"
)


def run() -> int:
    """Print one line per controller; return 0 if all of them work, else 1.

    Raises UserError if Horovod is not installed.
    """
    version = installed_version("horovod")
    if version is None:
        raise UserError("Horovod is not installed: run `hvdtrain horovod build --install`")
    print(f"horovod {version}")
    controllers, reason = _built_controllers()
    if not controllers:
        print(f"import horovod.torch: FAILED: {reason}")
        return EXIT_CRASH
    commands = {
        "gloo": ("horovodrun --gloo", functools.partial(horovodrun, RANKS, _WORKER)),
        "mpi": ("mpirun", functools.partial(mpirun, RANKS, _WORKER)),
    }
    failed = False
    for controller in controllers:
        name, command = commands[controller]
        try:
            reason = _all_reduce(command())
        except UserError as error:
            reason = str(error)
        print(f"{name} -np {RANKS}: {f'FAILED: {reason}' if reason else 'ok'}", flush=True)
        failed = failed or bool(reason)
    return EXIT_CRASH if failed else 0


def _built_controllers() -> tuple[list[str], str]:
    code, output = _run([sys.executable, "-c", _BUILT])
    lines = [line.split()[1:] for line in output.splitlines() if line.startswith("built:")]
    if code or not lines:
        return [], _last_line(output)
    return lines[-1], "the wheel has neither Gloo nor MPI"


def _all_reduce(command: list[str]) -> str:
    """Run the worker on 2 ranks; return the reason for a failure, or an empty string."""
    code, output = _run(command)
    if code:
        return f"exit code {code}: {_last_line(output)}"
    silent = [rank for rank in range(RANKS) if f"rank {rank} of {RANKS}: sum ok" not in output]
    return f"no result from rank {silent[0]}: {_last_line(output)}" if silent else ""


def _run(command: list[str]) -> tuple[int, str]:
    # Two spinning ranks on one core would take minutes; the user's settings take precedence.
    environment = {"OMP_NUM_THREADS": "1", **YIELDING, **os.environ}
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "output")
        try:
            code = run_logged(command, log, TIMEOUT_S, environment)
        except TimedOutError as error:
            return EXIT_CRASH, str(error)
        except OSError as error:
            return EXIT_CRASH, f"cannot start {command[0]}: {error.strerror}"
        return code, log.read_text(errors="replace")


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip(" -")]
    errors = [line for line in lines if "Error" in line or "error" in line]
    return (errors or lines or ["no output"])[-1]
