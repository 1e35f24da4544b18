"""The only place where configuration becomes objects."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import hvdtrain
from hvdtrain.checkpoint.writer import CheckpointWriter
from hvdtrain.config import Config, Settings
from hvdtrain.data.loader import TrainLoader
from hvdtrain.elastic.membership import Membership
from hvdtrain.engine.callbacks.checkpoint import SaveCheckpoints
from hvdtrain.engine.callbacks.evaluate import Evaluate
from hvdtrain.engine.callbacks.export import Export
from hvdtrain.engine.callbacks.log import LogMetrics
from hvdtrain.engine.callbacks.replicas import ReplicaCheck
from hvdtrain.engine.loop import Callback, Loop, Progress
from hvdtrain.engine.state import RunState
from hvdtrain.engine.step import TrainStep
from hvdtrain.errors import UserError
from hvdtrain.optim.exchange import GradientExchange
from hvdtrain.optim.optimizer import build_optimizer
from hvdtrain.optim.schedule import learning_rate
from hvdtrain.runtime.heartbeat import Heartbeat
from hvdtrain.runtime.rng import seed_all
from hvdtrain.runtime.signals import StopFlag
from hvdtrain.runtime.topology import Topology
from hvdtrain.tasks import Datasets, Task, optional
from hvdtrain.telemetry.exporter import Exporter
from hvdtrain.telemetry.metrics_file import MetricsFile


def build_task(settings: Settings) -> Task:
    """The task, its own configuration given to its constructor if it has one."""
    own = settings.task_config
    return settings.task_class() if own is None else settings.task_class(own)


def build_datasets(task: Task, config: Config) -> Datasets:
    """The task's data.

    Raises:
        UserError: no samples.
    """
    datasets = task.datasets()
    for name, dataset in (("training", datasets.train), ("validation", datasets.validation)):
        if dataset is not None and len(dataset) == 0:  # type: ignore[arg-type]
            raise UserError(f"task {config.task}: the {name} data has no samples")
    return datasets


def build_state(
    task: Task, config: Config, device: torch.device, datasets: Datasets, elastic: bool = False
) -> tuple[RunState, GradientExchange]:
    """Model and optimizer, freshly initialised from the seed."""
    seed_all(config.seed)
    model: nn.Module = task.model().to(device)
    exchange = GradientExchange(build_optimizer(config.optim, model), model, elastic)
    identity = {
        "seed": config.seed,
        "batch.global_size": config.batch.global_size,
        "optim.name": config.optim.name,
        "the number of training samples": len(datasets.train),  # type: ignore[arg-type]
        "the fingerprint of the training data": datasets.fingerprint,
    }
    state = RunState(model, exchange.optimizer, Progress(), identity)
    return state, exchange


@dataclass
class Callbacks:
    """The callbacks of a run, in the order in which the loop calls them."""

    replicas: ReplicaCheck | None
    export: Export | None
    evaluate: Evaluate | None
    log: LogMetrics
    checkpoint: SaveCheckpoints

    def as_list(self) -> list[Callback]:
        every = (self.replicas, self.export, self.evaluate, self.log, self.checkpoint)
        return [callback for callback in every if callback is not None]


def build_callbacks(
    config: Config,
    task: Task,
    datasets: Datasets,
    state: RunState,
    topology: Topology,
    device: torch.device,
    writer: CheckpointWriter | None,
    metrics: MetricsFile | None,
    exporter: Exporter | None,
    heartbeat: Heartbeat,
    healed: Callable[[int, list[int]], None] = lambda step, ranks: None,
) -> Callbacks:
    replicas = None
    if config.train.replica_check_every:
        replicas = ReplicaCheck(
            config.train.replica_check_every, config.checkpoint.every, state, healed
        )
    evaluate = None
    if config.eval.every and datasets.validation is not None:
        evaluate = Evaluate(
            config.eval, task, state.model, datasets.validation, topology, device, heartbeat
        )
    return Callbacks(
        replicas,
        Export(exporter) if exporter else None,
        evaluate,
        LogMetrics(metrics, optional(task, "units")),
        SaveCheckpoints(
            config.checkpoint,
            config.preempt.grace_seconds,
            state.capture,
            writer,
            metrics.sync if metrics else _nothing,
        ),
    )


def _nothing() -> None:
    pass


def build_loop(
    config: Config,
    task: Task,
    datasets: Datasets,
    state: RunState,
    exchange: GradientExchange,
    topology: Topology,
    device: torch.device,
    callbacks: Callbacks,
    stop: StopFlag,
    membership: Membership | None,
    heartbeat: Heartbeat,
) -> Loop:
    step = TrainStep(
        task,
        state.model,
        exchange,
        micro_batches=config.batch.micro_batches,
        micro_size=config.batch.micro_size,
        clip_norm=config.optim.clip_norm,
        device=device,
        heartbeat=heartbeat,
        elastic=membership is not None,
    )
    loader = TrainLoader(
        datasets.train,
        samples=state.progress.samples,
        global_size=config.batch.global_size,
        micro_size=config.batch.micro_size,
        rank=topology.rank,
        world_size=topology.world_size,
        seed=config.seed,
        pin_memory=device.type == "cuda",
    )
    return Loop(
        train=config.train,
        batch=config.batch,
        topology=topology,
        step=step,
        loader=loader,
        learning_rate=partial(
            learning_rate, config.schedule, config.optim.lr, steps=config.train.steps
        ),
        progress=state.progress,
        callbacks=callbacks.as_list(),
        stop=stop,
        meet=lambda: membership is not None and membership.hosts_changed,
        heartbeat=heartbeat,
    )


def build_exporter(config: Config, local_rank: int) -> Exporter | None:
    """This rank's exporter, which serves from now on; None where telemetry is off.

    Raises:
        UserError: its address cannot be listened on.
    """
    if config.telemetry.port == 0:
        return None
    return Exporter(config.telemetry, local_rank)


def run_facts(config: Config, run_id: str) -> dict[str, str]:
    """The labels of hvdtrain_run_info."""
    return {
        "run": run_id,
        "task": config.task,
        "hvdtrain": hvdtrain.__version__,
        "torch": torch.__version__,
    }


def export_checkpoints(exporter: Exporter, writer: CheckpointWriter) -> None:
    """Lets rank 0's exporter show what the writer does."""
    exporter.watch(
        "checkpoint_last_step", "Step of the newest checkpoint", lambda: writer.last_saved_step
    )
    exporter.watch(
        "checkpoint_failures", "Checkpoints that could not be written", lambda: writer.failures
    )
    exporter.watch(
        "checkpoint_stall_seconds",
        "How long the last one held up a step",
        lambda: writer.stall_seconds,
    )
    exporter.watch(
        "checkpoint_write_seconds",
        "How long the last one took to be written, beside the steps",
        lambda: writer.seconds,
    )


def build_manifest(
    settings: Settings,
    topology: Topology,
    device: torch.device,
    fingerprint: str | None,
    starts: list[dict[str, Any]],
) -> dict[str, Any]:
    """What RUN/manifest.json says: what ran, where, on which data.

    Args:
        starts: one entry for each start of the run so far, this one last.
    """
    versions = {"hvdtrain": hvdtrain.__version__, "python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in ("torch", "horovod", "numpy")}
    controller = "mpi" if hvd.mpi_enabled() else "gloo"
    return {
        "versions": versions,
        "task": settings.config.task,
        "world_size": topology.world_size,
        "hosts": topology.ranks_by_host(),
        "horovod": {
            "controller": controller,
            "built": {
                "mpi": bool(hvd.mpi_built()),
                "gloo": bool(hvd.gloo_built()),
                "nccl": bool(hvd.nccl_built()),
                "cuda": bool(hvd.cuda_built()),
            },
        },
        "device": device.type,
        "threads_per_rank": torch.get_num_threads(),
        "git_commit": _git_commit(),
        "data_fingerprint": fingerprint,
        "seed": settings.config.seed,
        "restarts": len(starts) - 1,
        "starts": starts,
    }


@cache
def _git_commit() -> str | None:
    """The commit of the working folder, so of the user's own code; None outside a repository."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, cwd=Path.cwd()
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
