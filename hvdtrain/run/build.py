"""The only place where configuration becomes objects."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import hvdtrain
from hvdtrain.config import Config, Settings
from hvdtrain.data.loader import TrainLoader
from hvdtrain.elastic.membership import Membership
from hvdtrain.engine.callbacks.checkpoint import SaveCheckpoints
from hvdtrain.engine.callbacks.evaluate import Evaluate
from hvdtrain.engine.callbacks.export import Export
from hvdtrain.engine.callbacks.log import LogMetrics
from hvdtrain.engine.callbacks.profile import Profile
from hvdtrain.engine.callbacks.replicas import ReplicaCheck
from hvdtrain.engine.callbacks.stragglers import DetectStragglers
from hvdtrain.engine.loop import Callback, Loop, Progress
from hvdtrain.engine.state import RunState
from hvdtrain.engine.step import TrainStep
from hvdtrain.errors import UserError
from hvdtrain.exchange.dense import GradientExchange
from hvdtrain.optim.optimizer import build_optimizer
from hvdtrain.optim.schedule import learning_rate
from hvdtrain.optim.supported import check_device, check_model
from hvdtrain.run.recorder import RunRecorder
from hvdtrain.run_files.folder import RunFolder
from hvdtrain.runtime.heartbeat import Heartbeat
from hvdtrain.runtime.phases import PhaseTimer, cuda_event
from hvdtrain.runtime.rng import seed_all
from hvdtrain.runtime.signals import StopFlag
from hvdtrain.runtime.topology import Topology
from hvdtrain.tasks import Datasets, Task, optional
from hvdtrain.telemetry.exporter import Exporter
from hvdtrain.telemetry.sinks import BackgroundSink
from hvdtrain.telemetry.trackers import build_sinks


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


def build_model(task: Task, config: Config, device: torch.device) -> nn.Module:
    """The task's model, freshly initialised from the seed.

    Raises:
        UserError: it cannot be trained.
    """
    seed_all(config.seed)
    model: nn.Module = task.model()
    check_model(model)
    model = model.to(device)
    check_device(model, device)
    return model


def build_state(
    model: nn.Module, config: Config, datasets: Datasets, elastic: bool = False
) -> tuple[RunState, GradientExchange]:
    """The model with its optimizer; Horovod exchanges something on the way."""
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
class RunComponents:
    """What a process makes once, and keeps through all generations of an elastic run."""

    task: Task
    datasets: Datasets
    device: torch.device
    state: RunState
    exchange: GradientExchange
    heartbeat: Heartbeat
    timer: PhaseTimer
    exporter: Exporter | None


@dataclass
class Callbacks:
    """The callbacks of a run, in the order in which the loop calls them."""

    replicas: ReplicaCheck | None
    export: Export | None
    stragglers: DetectStragglers | None
    evaluate: Evaluate | None
    log: LogMetrics
    checkpoint: SaveCheckpoints
    profile: Profile | None

    def as_list(self) -> list[Callback]:
        every = (getattr(self, field.name) for field in fields(self))
        return [callback for callback in every if callback is not None]


def build_callbacks(
    config: Config,
    components: RunComponents,
    topology: Topology,
    recorder: RunRecorder | None,
    folder: RunFolder,
    failed_at: float | None = None,
) -> Callbacks:
    """The callbacks of one generation.

    Args:
        recorder: rank 0's.
        failed_at: when the failure was that the generation comes after, unix time.
    """
    state, exporter, timer = components.state, components.exporter, components.timer
    emit = recorder.events.write if recorder else _nothing
    metrics = recorder.metrics if recorder else None
    replicas, stragglers, evaluate, profile = None, None, None, None
    if config.train.replica_check_every:
        replicas = ReplicaCheck(
            config.train.replica_check_every, config.checkpoint.every, state, emit
        )
    if config.telemetry.exchange_every:
        stragglers = DetectStragglers(
            config.telemetry,
            state.progress.step,
            timer,
            components.exchange,
            components.device,
            exporter,
            recorder.ranks if recorder else None,
            emit,
        )
    if config.eval.every and components.datasets.validation is not None:
        evaluate = Evaluate(
            config.eval,
            components.task,
            state.model,
            components.datasets.validation,
            topology,
            components.device,
            components.heartbeat,
            timer,
            config.seed,
        )
    if config.profile.steps is not None:
        profile = Profile(
            config.profile,
            folder.profile,
            state.progress.step,
            topology,
            timer,
            components.exchange,
            components.device,
        )
    return Callbacks(
        replicas,
        Export(exporter, failed_at) if exporter else None,
        stragglers,
        evaluate,
        LogMetrics(metrics, recorder.sinks if recorder else (), optional(components.task, "units")),
        SaveCheckpoints(
            config.checkpoint,
            config.preempt.grace_seconds,
            state.capture,
            recorder.writer if recorder else None,
            recorder.bring_to_disk if recorder else _nothing,
            timer,
        ),
        profile,
    )


def _nothing(*_: Any, **__: Any) -> None:
    pass


def build_loop(
    config: Config,
    components: RunComponents,
    topology: Topology,
    callbacks: Callbacks,
    stop: StopFlag,
    membership: Membership | None,
) -> Loop:
    state, device = components.state, components.device
    step = TrainStep(
        components.task,
        state.model,
        components.exchange,
        micro_batches=config.batch.micro_batches,
        micro_size=config.batch.micro_size,
        clip_norm=config.optim.clip_norm,
        device=device,
        heartbeat=components.heartbeat,
        timer=components.timer,
    )
    loader = TrainLoader(
        components.datasets.train,
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
        membership_changed=lambda: membership is not None and membership.hosts_changed,
        heartbeat=components.heartbeat,
    )


def build_timer(began: float, device: torch.device) -> PhaseTimer:
    """Args: began: time.perf_counter() at the process's start."""
    timer = PhaseTimer(began)
    if device.type == "cuda":
        timer.use_events(cuda_event)
    return timer


def build_exporter(
    config: Config,
    local_rank: int,
    device: torch.device,
    timer: PhaseTimer,
    exchange: GradientExchange,
) -> Exporter | None:
    """This rank's exporter, which serves from now on; None where telemetry is off.

    Raises:
        UserError: its address cannot be listened on, or a file of it cannot be used.
    """
    if config.telemetry.port == 0:
        return None
    exporter = Exporter(config.telemetry, local_rank)
    exporter.watch_totals(
        "phase_seconds", "Wall time of this process by what it did", "phase", timer.seconds
    )
    exporter.watch_total(
        "comm_inflight_seconds",
        "From the first gradient handed to Horovod to the end of the last, over all steps",
        lambda: exchange.inflight_seconds,
    )
    exporter.watch_total(
        "comm_bytes", "Bytes of the gradients that were exchanged", lambda: exchange.bytes
    )
    exporter.watch(
        "device_memory_bytes",
        "Memory of the device that tensors take up; 0 without a device of its own",
        lambda: torch.cuda.memory_allocated(device) if device.type == "cuda" else 0,
    )
    exporter.watch(
        "checkpoint_every_steps",
        "Steps between checkpoints; 0: not by steps",
        lambda: config.checkpoint.every,
    )
    exporter.watch(
        "checkpoint_every_seconds",
        "Seconds between checkpoints; 0: not by time",
        lambda: config.checkpoint.every_seconds,
    )
    return exporter


def build_recorder(config: Config, folder: RunFolder) -> RunRecorder:
    """Rank 0's, for a folder that it holds."""
    sinks = build_sinks(config.telemetry, folder.path)
    return RunRecorder(folder, config.checkpoint.keep, [BackgroundSink(sink) for sink in sinks])


def run_facts(config: Config) -> dict[str, str]:
    """The labels of hvdtrain_run_info."""
    return {
        "task": config.task,
        "hvdtrain": hvdtrain.__version__,
        "torch": torch.__version__,
    }


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
