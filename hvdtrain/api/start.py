"""`hvdtrain.run`: run `hvdtrain launch` as a child process of a notebook or a script.

It is a child process because the launcher takes over the signals of its process, and because a
notebook's imports and threads must not reach the ranks.
"""

from __future__ import annotations

import operator
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.api.flags import config_flags, import_directory, run_directory, task_flag
from hvdtrain.api.run import Run
from hvdtrain.errors import EXIT_USER, UserError
from hvdtrain.runtime.environment import launched_size
from hvdtrain.supervise.launcher import Launcher

# Set in the environment of every process started from here.
_STARTED = "HVDTRAIN_STARTED_BY"
_TICK_SECONDS = 0.05
# The launcher needs about half of this to end its ranks on all hosts.
_END_SECONDS = 30.0
_ERROR = "hvdtrain: error: "


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Args:
        directory: RUN/, absolute; `hvdtrain.Run` reads it
        metrics: the newest value of each metric of metrics.jsonl by name, such as "loss" and
            "validation_loss"; empty if no step was logged
        exit_code: 0 finished, 1 crashed, 3 the loss remained non-finite, 75 asked to stop
    """

    directory: Path
    metrics: dict[str, Any]
    exit_code: int


def run(
    task: str | type,
    np: int = 1,
    hosts: str | None = None,
    config: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
) -> RunResult:
    """Train on `np` ranks and wait for the end; the run's output goes to the screen.

    Ctrl-C (in a notebook: interrupt) ends the job on all hosts, then raises KeyboardInterrupt.

    Args:
        task: a preset ("gpt-nano"), a task ("image", "package.module:Class"), a YAML file, or a
            class that the ranks can import.
        np: number of ranks.
        hosts: "node1:2,node2:2", which need ssh access to each other; None: this machine.
        config: keys of the configuration, {"optim.lr": 0.1} or {"optim": {"lr": 0.1}}. The
            "run.id" of an earlier run resumes that run; default: a new ID of date and time.
        max_restarts: restarts without progress after a failure, from the newest checkpoint.

    Raises:
        UserError: an argument, a key or the data is wrong (exit code 2).

    Example:
        >>> keys = {"train.duration": 2, "run.id": "a"}
        >>> result = hvdtrain.run("digits", np=2, config=keys)
        >>> result.exit_code, result.directory.name, "loss" in result.metrics
        (0, 'a', True)
    """
    _check_place()
    _require(hasattr(np, "__index__") and np >= 1, f"np is the number of ranks, >= 1, not {np!r}")
    np = operator.index(np)
    _require(max_restarts >= 0, f"max_restarts must be >= 0, not {max_restarts}")
    named, keys = task_flag(task), config or {}
    directory = run_directory(named, keys)
    flags = [
        named,
        *config_flags(keys),
        f"--run.root={directory.parent}",
        f"--run.id={directory.name}",
    ]
    where = ["--hosts", hosts or f"localhost:{np}", "--min-np", str(np), "--max-np", str(np)]
    launch = ["launch", *where, "--max-restarts", str(max_restarts), "--"]
    more = _environment(import_directory(named))
    # Ranks on other hosts get their environment from the command.
    train = ["env", *more, sys.executable, "-m", "hvdtrain.train", *flags]
    env = os.environ | dict(word.split("=", 1) for word in more)
    launcher = Launcher([sys.executable, "-m", "hvdtrain.cli", *launch, *train], env, os.getcwd())
    code = _wait(launcher)
    last_lines = launcher.last_lines()
    if code == EXIT_USER:
        with suppress(OSError):
            directory.rmdir()  # only if it is empty: the run has not begun
        raise UserError(_reason(last_lines))
    newest = Run(directory).newest() if (directory / "config.yaml").exists() else {}
    return RunResult(directory, newest, code)


def _check_place() -> None:
    """Prevent endless starts by a task's own file that calls `run` when it is imported."""
    _require(
        _STARTED not in os.environ and (launched_size() or 1) == 1,
        "hvdtrain.run was called by a rank of a run: in a file that ranks import, "
        "put the call under `if __name__ == '__main__':`",
    )


def _environment(directory: Path | None) -> list[str]:
    """NAME=VALUE words that the launcher and the ranks get in addition to this environment."""
    words = [f"{_STARTED}=hvdtrain.run"]
    if directory is not None:
        path = filter(None, (str(directory), os.environ.get("PYTHONPATH")))
        words.append(f"PYTHONPATH={os.pathsep.join(path)}")
    return words


def _wait(launcher: Launcher) -> int:
    try:
        while (code := launcher.poll()) is None:
            time.sleep(_TICK_SECONDS)
        return code
    except BaseException:
        _end(launcher)
        raise


def _end(launcher: Launcher) -> None:
    """End the job as Ctrl-C ends `hvdtrain launch`; a second Ctrl-C does not wait."""
    try:
        launcher.send(signal.SIGINT)
        deadline = time.monotonic() + _END_SECONDS
        while launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)
    finally:
        if launcher.poll() is None:
            launcher.kill()  # the kernel then ends mpirun, and mpirun ends its ranks


def _reason(lines: Sequence[str]) -> str:
    errors = [line.partition(_ERROR)[2] for line in lines if _ERROR in line]
    return (
        errors[-1]
        if errors
        else "the run ended with exit code 2; its output above states the reason"
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)
