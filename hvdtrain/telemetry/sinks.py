"""Sinks for metrics in addition to metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

Each sink has a background thread, in which its package (an extra) is imported: that takes seconds.

A sink may fail, or block for minutes (a network, a disk): this is logged once and affects only the
sink's own metrics, never a step.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from hvdtrain.errors import EXIT_CRASH, EXIT_PREEMPTED, UserError
from hvdtrain.files import write_atomic
from hvdtrain.log import logger
from hvdtrain.telemetry.config import TelemetryConfig
from hvdtrain.untrusted import number, read_regular

# Maximum number of lines of metrics.jsonl that wait for a slow sink.
_WAITING = 1000
_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET", re.IGNORECASE)
_SHORTEST_SECRET = 4
_LONGEST_MESSAGE = 300
_FLUSH_SECONDS = 10
_STATES = {0: "FINISHED", EXIT_PREEMPTED: "KILLED"}  # MLflow's names
# Metrics that are not uploaded by then stay on disk, for `wandb sync`.
_UPLOAD_SECONDS = 8.0


class Sink(Protocol):
    """Target of metrics. All calls come from one thread; they may take long and raise anything.

    Attributes:
        name: for messages.
        module: imported before `open`.
    """

    name: str
    module: str

    def open(self, after: int) -> None:
        """Continue the run's curve, from the step after this one."""

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        """Store the finite metrics of a step, named as in metrics.jsonl; `at`: unix time."""

    def close(self, exit_code: int) -> None:
        """Save the remaining metrics; the process ends with this exit code."""


class BackgroundSink:
    """A sink with its own thread: only `wait_for_import` and `wait` block on it, with a timeout.

    Attributes:
        stuck: the sink did not finish before the deadline of `wait`.
    """

    def __init__(self, sink: Sink) -> None:
        self.stuck = False
        self._sink = sink
        self._lines: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._exit_code = EXIT_CRASH
        self._thread: threading.Thread | None = None
        self._imported = threading.Event()
        self._off = False  # it could not be opened
        self._failed = False
        self._full = False

    def start(self, after: int) -> None:
        """Open the sink for the steps after this one, in the background."""
        name = self._sink.name
        self._thread = threading.Thread(target=self._run, args=(after,), name=name, daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue a line of metrics.jsonl, or drop it if too many lines wait; never blocks."""
        if self._off:
            return
        if self._lines.qsize() < _WAITING:
            self._lines.put(dict(record))
        elif not self._full:
            self._full = True
            self._warn(f"accepts no lines: it misses metrics from step {record['step']} on")

    def close(self, exit_code: int) -> None:
        """Ask the sink to write the queued lines and to finish; `wait` waits for it.

        Args:
            exit_code: exit code of the process.
        """
        self._exit_code = exit_code
        self._lines.put(None)

    def wait_for_import(self, deadline: float) -> None:
        """Wait for the import of the sink's package, at most until `deadline`, as in `wait`."""
        if self._thread is not None:
            self._imported.wait(max(0.0, deadline - time.monotonic()))

    def wait(self, deadline: float) -> None:
        """Wait for the end of the sink, at most until time.monotonic() is `deadline`."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self.stuck = self._thread.is_alive()
        if self.stuck:
            self._warn("did not accept its last metrics in time")

    def _run(self, after: int) -> None:
        imported = self._try(lambda: importlib.import_module(self._sink.module))
        self._imported.set()
        self._off = not (imported and self._try(lambda: self._sink.open(after)))
        if self._off:
            return
        while (record := self._lines.get()) is not None:
            self._try(partial(self._write, record))
        self._try(lambda: self._sink.close(self._exit_code))

    def _write(self, record: Mapping[str, Any]) -> None:
        self._sink.write(record["step"], record["time"], _finite(record))

    def _try(self, part: Callable[[], object]) -> bool:
        try:
            part()
        except Exception as error:
            if not self._failed:
                self._failed = True
                self._warn(f"failed ({type(error).__name__}: {without_secrets(str(error))})")
            return False
        return True

    def _warn(self, what: str) -> None:
        logger.warning(
            "%s %s; training continues, and metrics.jsonl has all metrics", self._sink.name, what
        )


def _finite(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers in a line, without its step and time."""
    return {
        key: float(value)
        for key, value in record.items()
        if key not in ("step", "time") and number(value) is not None
    }


def without_secrets(text: str) -> str:
    """The beginning of a library's message, without secrets.

    Removes users and passwords in addresses, and the values of environment variables whose names
    indicate a secret.
    """
    text = " ".join(re.sub(r"(?<=://)[^/@\s]+@", "", text).split())
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + " ..."


class TensorBoard:
    """Event files in a directory, a new one for each process that writes them."""

    name = "tensorboard"
    module = "torch.utils.tensorboard"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None

    def open(self, after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hide later steps that a previous process wrote.
        self._writer = SummaryWriter(
            str(self._directory), purge_step=after + 1, flush_secs=_FLUSH_SECONDS
        )

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step, walltime=at)

    def close(self, exit_code: int) -> None:
        self._writer.close()


class WandB:
    """A run at Weights & Biases, continued through all starts. wandb skips steps that it has.

    Key, server and mode come from wandb's environment variables (WANDB_API_KEY, WANDB_MODE).

    Args:
        directory: run directory; wandb's files are in wandb/, the id of its run in wandb.id
    """

    name = module = "wandb"

    def __init__(self, project: str, directory: Path) -> None:
        self._project = project
        self._directory = directory
        self._run: Any = None

    def open(self, after: int) -> None:
        import wandb

        settings = wandb.Settings(
            silent=True,  # otherwise it prompts for a key
            console="off",  # otherwise it captures standard output
            disable_git=True,
            disable_code=True,
            finish_timeout=_UPLOAD_SECONDS,
        )
        wandb.setup(settings=settings)
        file = self._directory / "wandb.id"
        run_id = _read(file) or uuid.uuid4().hex
        write_atomic(file, run_id.encode())
        self._run = wandb.init(
            project=self._project,
            id=run_id,
            name=self._directory.name,
            dir=str(self._directory),
            resume="allow",
            settings=settings,
        )

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class MLflow:
    """A run of MLflow, continued through all starts. Steps that it has are skipped.

    The server comes from MLflow's environment variables (MLFLOW_TRACKING_URI and others).

    Args:
        directory: run directory; mlflow.id in it holds the id of MLflow's run
    """

    name = module = "mlflow"

    def __init__(self, experiment: str, directory: Path) -> None:
        self._experiment = experiment
        self._file = directory / "mlflow.id"
        self._run_name = directory.name
        self._client: Any = None
        self._run_id = ""
        self._last_step = 0

    def open(self, after: int) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        self._run_id = _read(self._file)
        if self._run_id:
            # A process killed within a batch has written only its first metric, the loss.
            written = self._client.get_metric_history(self._run_id, "loss")
            self._last_step = max((metric.step for metric in written), default=0)
            self._client.update_run(self._run_id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = (
            experiment.experiment_id
            if experiment is not None
            else self._client.create_experiment(self._experiment)
        )
        self._run_id = self._client.create_run(number, run_name=self._run_name).info.run_id
        write_atomic(self._file, self._run_id.encode())

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        if step <= self._last_step:
            return
        milliseconds = round(at * 1000)
        first = {"loss": metrics["loss"]} if "loss" in metrics else {}  # see `open`
        named = {**first, **metrics, "step": float(step)}
        entries = [Metric(key, value, milliseconds, step) for key, value in named.items()]
        self._client.log_batch(self._run_id, metrics=entries)
        self._last_step = step

    def close(self, exit_code: int) -> None:
        self._client.set_terminated(self._run_id, _STATES.get(exit_code, "FAILED"))


def build_sinks(config: TelemetryConfig, directory: Path) -> list[Sink]:
    """The configured sinks, for the run in this directory."""
    sinks: list[Sink] = []
    if config.tensorboard:
        sinks.append(TensorBoard(directory / "tensorboard"))
    if config.wandb_project is not None:
        sinks.append(WandB(config.wandb_project, directory))
    if config.mlflow_experiment is not None:
        sinks.append(MLflow(config.mlflow_experiment, directory))
    return sinks


def check_packages(config: TelemetryConfig) -> None:
    """Check that the packages of the configured sinks are installed: any rank may have to write.

    Raises:
        UserError: a package is missing.
    """
    wanted = {
        "tensorboard": config.tensorboard,
        "wandb_project": config.wandb_project is not None,
        "mlflow_experiment": config.mlflow_experiment is not None,
    }
    for key, asked in wanted.items():
        package = key.partition("_")[0]
        spec = importlib.util.find_spec(package) if asked else None
        # A directory wandb/ left by a run looks like a package without a file.
        if asked and (spec is None or spec.origin is None):
            raise UserError(
                f"telemetry.{key} requires a package that is not installed: pip install "
                f"'hvdtrain[{package}]'"
            )


def _read(file: Path) -> str:
    return read_regular(file).decode().strip() if file.exists() else ""
