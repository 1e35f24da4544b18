"""Where configuration becomes objects; see also exporting.py, model.py and exchange/build.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from hvdtrain import comm
from hvdtrain.config import Config, Settings
from hvdtrain.data.deal import Deal
from hvdtrain.data.loader import TrainLoader
from hvdtrain.data.loading import Loading
from hvdtrain.elastic.identity import Identity
from hvdtrain.engine.activations import arrange_activations
from hvdtrain.engine.compiling import compile_blocks
from hvdtrain.engine.flops import ModelFlops
from hvdtrain.engine.loop import Callback, Loop, Progress
from hvdtrain.engine.passes import Accumulate, Passes
from hvdtrain.engine.plan import Interruptions, Plan
from hvdtrain.engine.snapshot import Snapshot
from hvdtrain.engine.state import PRECISION, RunState
from hvdtrain.engine.step import TrainStep
from hvdtrain.engine.update import Update
from hvdtrain.exchange.base import Exchange
from hvdtrain.exchange.build import build_exchange, parts_exchange
from hvdtrain.log import logger
from hvdtrain.optim.ema import Ema
from hvdtrain.optim.precision import Precision, build_precision
from hvdtrain.optim.schedule import learning_rate
from hvdtrain.run.bucketing import RunBuckets, build_buckets
from hvdtrain.run.curve import build_identity
from hvdtrain.run.data import build_data
from hvdtrain.run.exporting import build_exporter
from hvdtrain.run.fit import Trial, with_micro_size
from hvdtrain.run.length import dataset_size, with_global_batch, with_steps
from hvdtrain.run.model import build_flops, build_model
from hvdtrain.run.optimizer import build_agree, build_run_optimizer
from hvdtrain.run.spanning import build_norm, form_mesh, shard_model, spanned_parts, split_model
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.collectives import on_all_ranks
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.determinism import use_deterministic_kernels
from hvdtrain.runtime.device import choose_device
from hvdtrain.runtime.heartbeat import Heartbeat
from hvdtrain.runtime.mesh import Mesh
from hvdtrain.runtime.phases import PhaseTimer, cuda_event
from hvdtrain.runtime.topology import Topology
from hvdtrain.tasks import Datasets, Task
from hvdtrain.tasks.batch import collate_of
from hvdtrain.telemetry.exporter import Exporter
from hvdtrain.telemetry.trackers import check_packages

if TYPE_CHECKING:
    from hvdtrain.parallel.cut import CutModel


@dataclass
class RunComponents:
    """What a process makes once, and keeps through all generations of an elastic run.

    Args:
        config: all of it, with what follows from the ranks and the data, see length.py.
        snapshot: where ranks step on their own and a failure does not end the run.
        flops: None where they or the device's peak are not known.
        mesh: of a model that spans ranks, which do not change then.
        cut: with parallel.pipeline, this rank's stages.
    """

    config: Config
    task: Task
    datasets: Datasets
    device: torch.device
    state: RunState
    exchange: Exchange
    timer: PhaseTimer
    exporter: Exporter | None
    snapshot: Snapshot | None
    precision: Precision
    flops: ModelFlops | None
    ema: Ema | None = None
    buckets: RunBuckets = field(default_factory=RunBuckets)
    heartbeat: Heartbeat = field(default_factory=lambda: heartbeat.OWN)
    mesh: Mesh | None = None
    cut: CutModel | None = None

    def context(self, topology: Topology) -> RankContext:
        """For a generation with these ranks."""
        mesh = self.mesh or Mesh.replicated(topology)
        return RankContext(mesh, self.device, self.heartbeat, self.timer)

    def loading(self) -> Loading:
        """Of batches, in training and evaluation."""
        pin_memory = self.device.type == "cuda"
        return Loading(self.config.loader, pin_memory, collate_of(self.task))

    def identity(self, digest: str) -> Identity:
        """What this process would train; those of a run have the same.

        Args:
            digest: of the configuration.
        """
        size, fingerprint = dataset_size(self.datasets), self.datasets.fingerprint
        return Identity(self.device.type, digest, size, fingerprint, self.precision.name)

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
    given = with_global_batch(settings.config, topology.world_size)
    if given.exchange.exact:
        use_deterministic_kernels()
    # In an elastic run local ranks change, and GPUs do not.
    device_index = start.local_rank if start.elastic else None
    device = on_all_ranks("device", lambda: choose_device(topology, device_index))
    precision = on_all_ranks("precision", lambda: build_precision(given.precision, device))
    mesh = form_mesh(given.parallel, topology, device)
    timer = comm.OWN.timer = build_timer(start.clock, device)
    task, datasets = data or on_all_ranks("data", lambda: build_data(settings))
    buckets = on_all_ranks("batch.max_tokens", lambda: build_buckets(given, datasets))
    config = on_all_ranks("train.epochs", lambda: with_steps(given, datasets, buckets.train))
    model = on_all_ranks("model", lambda: build_model(task, config, device))
    flops = build_flops(config, task, datasets, model, precision.dtype(model))
    cut = on_all_ranks("parallel", lambda: split_model(config, task, model, mesh))
    # After the FLOPs were counted: what is computed again is none of the model's.
    on_all_ranks("memory", lambda: arrange_activations(config.memory, task, model, device))
    config = with_micro_size(config, Trial(task, model, datasets, precision, config.seed), topology)
    compiled = on_all_ranks("compile", lambda: compile_blocks(config.compile, task, model, timer))
    on_all_ranks("parallel.shard", lambda: shard_model(config, task, model, mesh, cut))
    optimizer = on_all_ranks(
        "optimizer", lambda: build_run_optimizer(config, task, model, precision, start.elastic)
    )
    micro_batches = config.batch.micro_batches
    exchange = (
        build_exchange(config.exchange, micro_batches, optimizer, model, start.elastic)
        if mesh.model is None
        else parts_exchange(optimizer, model, mesh)
    )
    parts = [*exchange.state_parts()]
    if precision.loss_scale is not None:
        precision.loss_scale.unscale_gradients(exchange.parameters)
        parts.append(precision.loss_scale)
    decay = config.optim.ema_decay
    ema = Ema(optimizer, model, decay) if decay else None
    if ema is not None and mesh.model is None:
        parts.append(ema)
    identity = {**build_identity(config, datasets, buckets.train), PRECISION: precision.name}
    spanned = spanned_parts(mesh, model, optimizer, cut, ema)
    state = RunState(model, optimizer, Progress(), identity, parts, spanned)
    on_all_ranks("sinks", lambda: check_packages(config.telemetry))
    exporter = on_all_ranks(
        "telemetry",
        lambda: build_exporter(
            config, start.local_rank, device, timer, exchange, precision.loss_scale, compiled
        ),
    )
    snapshot = Snapshot(state) if start.elastic and config.exchange.sync_every else None
    return RunComponents(
        config, task, datasets, device, state, exchange, timer, exporter, snapshot, precision,
        flops, ema, buckets, mesh=None if mesh.model is None else mesh, cut=cut,
    )  # fmt: skip


def build_loop(
    config: Config,
    components: RunComponents,
    callbacks: list[Callback],
    interruptions: Interruptions,
    context: RankContext,
) -> Loop:
    """The loop of one generation."""
    state, exchange = components.state, components.exchange
    batch, buckets = config.batch, components.buckets.train
    passes = build_passes(config, components, context)
    if config.precision.name == "auto":
        chosen = components.precision.name, context.device.type
        logger.info("precision.name auto: %s, on %s", *chosen)
    if config.memory.fit:
        logger.info("memory.fit: batch.micro_size %d", config.batch.micro_size)
    loss_scale = components.precision.loss_scale
    sharded = state.sharded.optimizer if state.sharded else None
    update = Update(
        state.optimizer,
        exchange,
        config.optim.clip_norm,
        loss_scale,
        build_norm(context.mesh, context.device, components.cut),
        build_agree(sharded, context),
    )
    loader = TrainLoader(
        components.datasets.train,
        samples=state.progress.samples,
        batch=config.batch,
        deal=Deal(config.batch.micro_batches, context.mesh.data, context.mesh.shard),
        seed=config.seed,
        loading=components.loading(),
        buckets=buckets,
    )
    rate = partial(learning_rate, config.schedule, config.optim.lr, steps=config.train.steps)
    return Loop(
        Plan(
            config.train,
            config.batch,
            rate,
            lambda step: buckets.samples_of(step, batch.per_step) if buckets else batch.global_size,
            dataset_size(components.datasets),
            config.exchange.sync_every or 1,
        ),
        TrainStep(passes, exchange, update, batch, context, buckets, sharded),
        loader,
        state.progress,
        callbacks,
        interruptions,
        context,
    )


def build_passes(config: Config, components: RunComponents, context: RankContext) -> Passes:
    """Forward and backward of one generation, for training and for evaluation."""
    task, cut = components.task, components.cut
    micro_batches, exact = config.batch.micro_batches, config.exchange.exact
    precision = components.precision
    if cut is None or context.mesh.model is None:
        model = components.state.model
        return Accumulate(task, model, micro_batches, context, exact, precision)
    from hvdtrain.engine.pipeline import Pipeline

    group = context.mesh.model.get_group("pipeline")
    schedule = config.parallel.schedule
    return Pipeline(task, cut, schedule, group, micro_batches, context, precision=precision)


def build_timer(began: float, device: torch.device) -> PhaseTimer:
    """Args: began: time.perf_counter() at the process's start."""
    timer = PhaseTimer(began)
    if device.type == "cuda":
        timer.use_events(cuda_event)
    return timer
