"""Where configuration becomes objects; of the exporter, see exporting.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvdtrain import comm
from hvdtrain.config import Config, Settings
from hvdtrain.data.deal import Deal
from hvdtrain.data.loader import TrainLoader
from hvdtrain.engine.flops import ModelFlops, count
from hvdtrain.engine.loop import Callback, Interruptions, Loop, Plan, Progress
from hvdtrain.engine.passes import Accumulate
from hvdtrain.engine.snapshot import Snapshot
from hvdtrain.engine.state import RunState
from hvdtrain.engine.step import TrainStep
from hvdtrain.engine.update import Update
from hvdtrain.errors import UserError
from hvdtrain.exchange.adasum import adasum_exchange
from hvdtrain.exchange.base import Exchange
from hvdtrain.exchange.dense import DenseExchange
from hvdtrain.exchange.exact import exact_exchange
from hvdtrain.exchange.local_sgd import LocalSgd, Nesterov
from hvdtrain.exchange.powersgd import powersgd_exchange
from hvdtrain.exchange.topk import topk_exchange
from hvdtrain.optim.optimizer import build_optimizer
from hvdtrain.optim.schedule import learning_rate
from hvdtrain.optim.supported import check_device, check_model
from hvdtrain.run.exporting import build_exporter
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.collectives import on_all_ranks
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.determinism import use_deterministic_kernels
from hvdtrain.runtime.device import choose_device
from hvdtrain.runtime.heartbeat import Heartbeat
from hvdtrain.runtime.mesh import Mesh
from hvdtrain.runtime.phases import PhaseTimer, cuda_event
from hvdtrain.runtime.rng import seed_all
from hvdtrain.runtime.topology import Topology
from hvdtrain.tasks import Datasets, Task, optional
from hvdtrain.telemetry.exporter import Exporter
from hvdtrain.telemetry.peaks import peak_of
from hvdtrain.telemetry.trackers import check_packages


@dataclass
class RunComponents:
    """What a process makes once, and keeps through all generations of an elastic run.

    Args:
        snapshot: where ranks step on their own and a failure does not end the run.
        flops: None where they or the device's peak are not known.
    """

    task: Task
    datasets: Datasets
    device: torch.device
    state: RunState
    exchange: Exchange
    timer: PhaseTimer
    exporter: Exporter | None
    snapshot: Snapshot | None
    flops: ModelFlops | None
    heartbeat: Heartbeat = field(default_factory=lambda: heartbeat.OWN)

    def context(self, mesh: Mesh) -> RankContext:
        """For a generation with these ranks."""
        return RankContext(mesh, self.device, self.heartbeat, self.timer)

    def go_back(self) -> None:
        """After a failure: to the state that all ranks last had in common."""
        if self.snapshot is not None and not self.exchange.synchronised:
            self.snapshot.restore()


@dataclass(frozen=True)
class Start:
    """How this process was started.

    Args:
        clock: time.perf_counter() when it began.
        local_rank: its number on its host, as its launcher had it first.
        elastic: processes may join and leave.
    """

    clock: float
    local_rank: int
    elastic: bool = False


def build_components(
    settings: Settings,
    topology: Topology,
    start: Start,
    data: tuple[Task, Datasets] | None = None,
) -> RunComponents:
    """Everything that does not depend on who takes part; each part on all ranks, or on none.

    Args:
        data: the task and its data sets, where the caller has them already.

    Raises:
        AgreedError: some rank cannot.
    """
    config = settings.config
    if config.exchange.exact:
        use_deterministic_kernels()
    # In an elastic run local ranks change, and GPUs do not.
    device_index = start.local_rank if start.elastic else None
    device = on_all_ranks("device", lambda: choose_device(topology, device_index))
    timer = comm.OWN.timer = build_timer(start.clock, device)
    task, datasets = data or on_all_ranks("data", lambda: build_data(settings))
    model = on_all_ranks("model", lambda: build_model(task, config, device))
    flops = build_flops(config, task, datasets, model, device)
    groups = optional(task, "param_groups")
    optimizer = on_all_ranks(
        "optimizer",
        lambda: build_optimizer(config.optim, model, groups(model) if groups else None),
    )
    exchange = build_exchange(config, optimizer, model, start.elastic)
    state = RunState(
        model, optimizer, Progress(), build_identity(config, datasets), exchange.state_parts()
    )
    on_all_ranks("sinks", lambda: check_packages(config.telemetry))
    exporter = on_all_ranks(
        "telemetry", lambda: build_exporter(config, start.local_rank, device, timer, exchange)
    )
    snapshot = Snapshot(state) if start.elastic and config.exchange.sync_every else None
    return RunComponents(task, datasets, device, state, exchange, timer, exporter, snapshot, flops)


def build_data(settings: Settings) -> tuple[Task, Datasets]:
    """The task and its data.

    Raises:
        UserError: no samples.
    """
    task = build_task(settings)
    return task, build_datasets(task, settings.config)


def build_task(settings: Settings) -> Task:
    """The task, its own configuration given to its constructor if it has one."""
    own = settings.task_config
    return settings.task_class() if own is None else settings.task_class(own)


def build_datasets(task: Task, config: Config) -> Datasets:
    """The task's data.

    Raises:
        UserError: no samples, or nobody knows how many.
    """
    datasets = task.datasets()
    for name, dataset in (("training", datasets.train), ("validation", datasets.validation)):
        if dataset is None:
            continue
        try:
            size = len(dataset)  # type: ignore[arg-type]
        except TypeError:
            raise UserError(
                f"task {config.task}: the {name} data has no length: {type(dataset).__name__} "
                "needs __len__, the number of samples of an epoch"
            ) from None
        if size == 0:
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


def build_flops(
    config: Config, task: Task, datasets: Datasets, model: nn.Module, device: torch.device
) -> ModelFlops | None:
    """The model's FLOPs and the device's, where both are known."""
    dtype = next(model.parameters()).dtype
    peak = config.telemetry.peak_flops or peak_of(device, dtype)
    flops = count(task, model, datasets.train, config.batch.micro_size) if peak else None
    return ModelFlops(flops, peak) if peak and flops else None


def build_exchange(
    config: Config, optimizer: Optimizer, model: nn.Module, elastic: bool
) -> Exchange:
    """What the keys of `exchange` mean."""
    exchange = config.exchange
    if exchange.sync_every:
        outer = Nesterov(exchange.outer_lr, exchange.outer_momentum)
        return LocalSgd(
            optimizer,
            model,
            config.batch.micro_batches,
            outer if exchange.outer == "nesterov" else None,
        )
    if exchange.exact:
        return exact_exchange(optimizer, model, config.batch.micro_batches)
    if exchange.reduce == "adasum":
        return adasum_exchange(optimizer, model)
    if exchange.compression == "topk":
        return topk_exchange(optimizer, model, exchange.ratio, exchange.error_feedback)
    if exchange.compression == "powersgd":
        return powersgd_exchange(optimizer, model, exchange)
    return DenseExchange(optimizer, model, elastic, exchange.wire)


def build_identity(config: Config, datasets: Datasets) -> dict[str, Any]:
    """What the run's curve follows from, see RunState."""
    return {
        "seed": config.seed,
        "batch.global_size": config.batch.global_size,
        "optim.name": config.optim.name,
        "the number of training samples": len(datasets.train),  # type: ignore[arg-type]
        "the fingerprint of the training data": datasets.fingerprint,
    }


def build_loop(
    config: Config,
    components: RunComponents,
    callbacks: list[Callback],
    interruptions: Interruptions,
    context: RankContext,
) -> Loop:
    """The loop of one generation."""
    state, exchange = components.state, components.exchange
    passes = build_passes(config, components, context)
    update = Update(state.optimizer, exchange, config.optim.clip_norm)
    loader = TrainLoader(
        components.datasets.train,
        samples=state.progress.samples,
        batch=config.batch,
        deal=Deal(config.batch.micro_batches, context.mesh.data),
        seed=config.seed,
        pin_memory=components.device.type == "cuda",
    )
    rate = partial(learning_rate, config.schedule, config.optim.lr, steps=config.train.steps)
    return Loop(
        Plan(config.train, config.batch, rate, config.exchange.sync_every or 1),
        TrainStep(passes, exchange, update, config.batch, context),
        loader,
        state.progress,
        callbacks,
        interruptions,
        context,
    )


def build_passes(config: Config, components: RunComponents, context: RankContext) -> Accumulate:
    """Forward and backward of one generation, for training and for evaluation."""
    return Accumulate(
        components.task,
        components.state.model,
        config.batch.micro_batches,
        context,
        exact=config.exchange.exact,
    )


def build_timer(began: float, device: torch.device) -> PhaseTimer:
    """Args: began: time.perf_counter() at the process's start."""
    timer = PhaseTimer(began)
    if device.type == "cuda":
        timer.use_events(cuda_event)
    return timer
