"""Sinks for TensorBoard, Weights & Biases and MLflow. Each package is an extra.

Packages are imported when a sink is opened, in the sink's own thread, because that takes seconds.
"""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.errors import EXIT_PREEMPTED, UserError
from hvdtrain.files import write_atomic
from hvdtrain.telemetry.config import TelemetryConfig
from hvdtrain.telemetry.sinks import Sink
from hvdtrain.untrusted import read_regular

_FLUSH_SECONDS = 10
_STATES = {0: "FINISHED", EXIT_PREEMPTED: "KILLED"}  # MLflow's names
# Metrics that are not uploaded by then stay on disk, for `wandb sync`.
_UPLOAD_SECONDS = 8.0


class TensorBoard:
    """Event files in a directory, a new one for each process that writes them."""

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None

    def open(self, after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hide later steps that a previous process wrote.
        self._writer = SummaryWriter(
            str(self._directory), purge_step=after + 1, flush_secs=_FLUSH_SECONDS
        )

    def write(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        for key, value in figures.items():
            self._writer.add_scalar(key, value, step, walltime=at)

    def close(self, exit_code: int) -> None:
        self._writer.close()


class WandB:
    """A run at Weights & Biases, continued through all starts. wandb skips steps that it has.

    Key, server and mode come from wandb's environment variables (WANDB_API_KEY, WANDB_MODE).

    Args:
        directory: run directory; wandb's files are in wandb/, the id of its run in wandb.id
    """

    name = "wandb"

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

    def write(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class MLflow:
    """A run of MLflow, continued through all starts. Steps that it has are skipped.

    The server comes from MLflow's environment variables (MLFLOW_TRACKING_URI and others).

    Args:
        directory: run directory; mlflow.id in it holds the id of MLflow's run
    """

    name = "mlflow"

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

    def write(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        if step <= self._last_step:
            return
        milliseconds = round(at * 1000)
        first = {"loss": figures["loss"]} if "loss" in figures else {}  # see `open`
        named = {**first, **figures, "step": float(step)}
        metrics = [Metric(key, value, milliseconds, step) for key, value in named.items()]
        self._client.log_batch(self._run_id, metrics=metrics)
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
                f"telemetry.{key} needs a package that is not here: pip install "
                f"'hvdtrain[{package}]'"
            )


def _read(file: Path) -> str:
    return read_regular(file).decode().strip() if file.exists() else ""
