"""Construction of a run's objects; see also exporting.py and exchange/build.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvdtrain.config import Config
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.loader import Loading, StepLoader, TrainLoader, has_own_order
from hvdtrain.data.order import describe
from hvdtrain.data.stream import StreamLoader
from hvdtrain.engine.accumulate import Accumulate, Passes
from hvdtrain.engine.callbacks.digests import RecordSamples
from hvdtrain.engine.changing_buffers import ChangingBuffers
from hvdtrain.engine.flops import ModelFlops, count
from hvdtrain.engine.interleave import InterleavedBackward
from hvdtrain.engine.iteration import Iteration
from hvdtrain.engine.loop import Callback, Interruptions, Loop, TrainingPlan
from hvdtrain.engine.memory import arrange_activations, compile_blocks
from hvdtrain.engine.replay import Replay, ReplayActions, ReplayPlan
from hvdtrain.engine.state import ORDER, PRECISION, RunState, Snapshot
from hvdtrain.engine.step import TrainStep, Update
from hvdtrain.errors import UserError
from hvdtrain.exchange.base import Exchange, trainable
from hvdtrain.exchange.local_sgd import LocalSgd
from hvdtrain.log import logger
from hvdtrain.optim.ema import Ema
from hvdtrain.optim.optimizer import build_optimizer, learning_rate
from hvdtrain.optim.precision import BF16_PARAMS, Precision, check_parameters, to_bfloat16
from hvdtrain.optim.trainable import check_device, check_model, freeze
from hvdtrain.parallel.agreement import Agreement
from hvdtrain.process.fit import Trial, with_micro_size
from hvdtrain.process.prepare import Prepared
from hvdtrain.process.repeatable import check_repeatable
from hvdtrain.process.resolve import Resolved, RunBuckets, dataset_size
from hvdtrain.process.strategy import Strategy
from hvdtrain.run_files.digests import DigestFiles
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.collectives import on_all_ranks
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.device import seed_all
from hvdtrain.runtime.heartbeat import Heartbeat
from hvdtrain.runtime.mesh import Topology
from hvdtrain.tasks import Datasets, Task, collate_of, optional
from hvdtrain.telemetry.exporter import Exporter
from hvdtrain.telemetry.gpu import gain_of_bf16, peak_of
from hvdtrain.telemetry.sinks import check_packages


@dataclass
class RunComponents:
    """Objects that train: built once per process, or per generation if the model spans ranks.

    Args:
        prepared: objects built before the rank knew other ranks.
        strategy: distributes the model over ranks.
        config: the configuration, with values derived from the ranks and the data, see resolve.py.
        snapshot: last common state; in an elastic run whose ranks step independently.
        older: this rank's own state, complete and a step behind, while it receives a newer one.
        flops: None if the model's FLOPs or the device's peak are unknown.
        agreement: in an elastic run whose ranks hold shards of the model or its optimizer.
        interleaved: with batch.interleave.
        iteration: of a script with its own loop.
    """

    prepared: Prepared
    strategy: Strategy
    config: Config
    state: RunState
    exchange: Exchange
    exporter: Exporter | None
    snapshot: Snapshot | None
    flops: ModelFlops | None
    ema: Ema | None = None
    heartbeat: Heartbeat = field(default_factory=lambda: heartbeat.HEARTBEAT)
    agreement: Agreement | None = None
    interleaved: InterleavedBackward | None = None
    older: Snapshot | None = None
    iteration: Iteration | None = None

    @property
    def task(self) -> Task:
        return self.prepared.task

    @property
    def datasets(self) -> Datasets:
        return self.prepared.datasets

    @property
    def device(self) -> torch.device:
        return self.prepared.device

    @property
    def precision(self) -> Precision:
        return self.prepared.precision

    @property
    def buckets(self) -> RunBuckets:
        return self.prepared.buckets

    def context(self, topology: Topology, claim: str = "") -> RankContext:
        """Context of a generation with these ranks."""
        mesh, prepared = self.strategy.mesh(topology), self.prepared
        timer, memory = prepared.timer, prepared.memory
        return RankContext(mesh, self.device, self.heartbeat, timer, memory, claim)

    def loading(self) -> Loading:
        """How batches are loaded in training and evaluation."""
        pin_memory = self.device.type == "cuda"
        files = DigestFiles.of_this_process()
        observe = RecordSamples(files) if files is not None else None
        return Loading(self.config.loader, pin_memory, collate_of(self.task), observe)


def build_components(prepared: Prepared, strategy: Strategy, topology: Topology) -> RunComponents:
    """Build the objects that train; each on all ranks, or on no rank.

    Raises:
        AgreedError: a rank cannot build one.
    """
    config, task, device = prepared.config, prepared.task, prepared.device
    datasets, precision, timer = prepared.datasets, prepared.precision, prepared.timer
    elastic = prepared.start.elastic
    strategy.form(topology, device)
    model = on_all_ranks("model", lambda: build_model(task, config, device))
    on_all_ranks("precision", lambda: check_parameters(precision.name, model))
    flops = build_flops(config, task, datasets, model, precision.dtype(model))
    on_all_ranks("parallel", lambda: strategy.split(task, model))
    # After counting FLOPs: recomputed activations are not FLOPs of the model.
    on_all_ranks("memory", lambda: arrange_activations(config.memory, task, model, device))
    config = with_micro_size(config, Trial(task, model, datasets, precision, config.seed), topology)
    compiled = on_all_ranks("compile", lambda: compile_blocks(config.compile, task, model, timer))
    on_all_ranks("parallel.shard.degree", lambda: strategy.shard(task, model))
    interleaved = on_all_ranks(
        "batch.interleave", lambda: _interleaved(config, task, model, device)
    )
    if config.exchange.exact:
        size, buckets = config.batch.micro_samples, prepared.buckets.train
        of_run = task, model, datasets, precision, config.seed, size, buckets
        on_all_ranks("repeatable", lambda: check_repeatable(*of_run))
    optimizer = on_all_ranks(
        "optimizer",
        lambda: strategy.optimizer(build_run_optimizer(config, task, model), precision),
    )
    exchange = strategy.exchange(optimizer, model, config.batch.micro_batches)
    parts = [*exchange.state_parts()]
    script = optional(task, "script_state")
    if script is not None:
        parts.append(script)
    if prepared.stream is not None:
        parts.append(prepared.stream)
    if precision.loss_scale is not None:
        with trainable(exchange.parameters):
            precision.loss_scale.unscale_gradients(exchange.parameters)
        parts.append(precision.loss_scale)
    decay = config.optim.ema_decay
    ema = Ema(optimizer, model, decay) if decay else None
    more, spanned = strategy.state_parts(model, optimizer, ema)
    parts += more
    identity = {
        **build_identity(config, datasets, prepared.resolved), PRECISION: precision.name
    }  # fmt: skip
    state = RunState(
        model, optimizer, prepared.progress, identity, parts, spanned, prepared.samples
    )
    on_all_ranks("sinks", lambda: check_packages(config.telemetry))
    exporter = on_all_ranks("telemetry", lambda: prepared.export(config, exchange, compiled))
    return RunComponents(
        prepared, strategy, config, state, exchange, exporter,
        snapshot=Snapshot(state) if elastic and isinstance(exchange, LocalSgd) else None,
        flops=flops,
        ema=ema,
        agreement=strategy.agreement(state),
        interleaved=interleaved,
        iteration=Iteration(script, state, elastic) if script is not None else None,
    )  # fmt: skip


def build_identity(config: Config, datasets: Datasets, resolved: Resolved) -> dict[str, Any]:
    """Return the properties that determine the run's loss curve, see RunState."""
    batch: dict[str, Any] = {"batch.global_size": config.batch.global_size}
    buckets = resolved.buckets.train
    if buckets is not None:
        batch = {
            "batch.max_tokens": config.batch.max_tokens,
            "batch.per_step": config.batch.per_step,
            "the fingerprint of the samples' lengths": buckets.fingerprint,
        }
    return {
        "seed": config.seed,
        **batch,
        **({ORDER: describe(resolved.order)} if resolved.order is not None else {}),
        "optim.name": config.optim.name,
        "the number of training samples": dataset_size(datasets),
        "the fingerprint of the training data": datasets.fingerprint,
    }


def _interleaved(
    config: Config, task: Task, model: torch.nn.Module, device: torch.device
) -> InterleavedBackward | None:
    count = config.batch.interleave
    return (
        InterleavedBackward(task, model, count, device, heartbeat.HEARTBEAT) if count > 1 else None
    )


def build_loop(
    config: Config,
    components: RunComponents,
    callbacks: list[Callback],
    interruptions: Interruptions,
    context: RankContext,
    actions: ReplayActions | None = None,
) -> Loop:
    """Build the loop of one generation.

    Args:
        actions: called by replays; None: no replays.
    """
    state, exchange = components.state, components.exchange
    resolved, buckets = components.prepared.resolved, components.buckets.train
    batch = config.batch
    passes = build_passes(config, components, context)
    if config.precision.name == "auto":
        chosen = components.precision.name, context.device.type
        logger.info("precision.name auto: %s, on %s", *chosen)
    elif gain := gain_of_bf16(context.device, components.precision.dtype(state.model)):
        logger.info(
            "precision.name %s: this GPU multiplies bfloat16 %s; --precision.name bf16 uses it",
            config.precision.name,
            gain,
        )
    if components.prepared.config.batch.micro_size == "auto":
        logger.info("batch.micro_size auto: %d", config.batch.micro_size)
    loss_scale = components.precision.loss_scale
    sharded = state.sharded.optimizer if state.sharded else None
    update = Update(
        state.optimizer,
        exchange,
        config.optim.clip_norm,
        loss_scale,
        components.strategy.norm(context.device),
    )
    if components.iteration is not None:
        saved = passes.buffers
        passes.changing = ChangingBuffers(state.model, saved.by_place, saved.add)
    # In a script with its own loop, only the script can compute a gradient.
    replays = actions is not None and components.iteration is None
    every = (config.integrity.replay_every or 0) if replays else 0
    topology = context.mesh.topology
    plan = ReplayPlan(every, topology.rank, topology.hosts)
    dataset, samples = components.datasets.train, state.progress.samples
    assignment = Assignment(config.batch.micro_batches, context.mesh.data, context.mesh.shard)
    source = samples, config.batch, assignment, config.seed
    loader: StepLoader
    replay = None
    if has_own_order(dataset):
        assert components.prepared.stream is not None
        loader = StreamLoader(dataset, *source, components.prepared.stream, components.loading())
    else:
        loading = components.loading()
        loader = indexed = TrainLoader(dataset, *source, loading, buckets, plan.replayed)
        if plan.every and topology.world_size > 1 and actions is not None:
            assert isinstance(passes, Accumulate)
            trained, progress = exchange.trained, state.progress
            replay = Replay(
                plan, passes, trained, indexed, lambda: progress.samples, actions, context
            )  # fmt: skip
    step = TrainStep(
        passes, exchange, update, batch, context, buckets, sharded, components.agreement, replay
    )
    rate = optional(components.task, "schedule") or partial(
        learning_rate, config.schedule, config.optim.lr, steps=config.train.steps
    )
    return Loop(
        TrainingPlan(
            config.train,
            config.batch,
            rate,
            resolved.samples_of,
            resolved.epoch_samples,
            config.seed,
        ),
        step,
        loader,
        state.progress,
        state.applied,
        callbacks,
        interruptions,
        context,
        components.iteration,
    )


def build_passes(config: Config, components: RunComponents, context: RankContext) -> Passes:
    """Build the forward and backward passes of one generation, for training and evaluation."""
    task, precision, stages = components.task, components.precision, components.strategy.stages
    micro_batches = config.batch.micro_batches
    if stages is not None:
        from hvdtrain.engine.pipeline import Pipeline

        group, schedule = context.mesh.axes.get_group("pipeline"), config.parallel.schedule
        return Pipeline(task, stages, schedule, group, micro_batches, context, precision=precision)
    model, interleaved = components.state.model, components.interleaved
    exact = config.exchange.exact
    return Accumulate(task, model, micro_batches, context, exact, precision, interleaved)


# --- model and optimizer ------------------------------------------------------


def build_model(task: Task, config: Config, device: torch.device) -> nn.Module:
    """Build the task's model, initialized from the seed.

    Raises:
        UserError: the model cannot be trained, or a name in optim.freeze matches nothing in it.
    """
    seed_all(config.seed)
    model: nn.Module = task.model()
    freeze(model, config.optim.freeze)
    check_model(model)
    if config.precision.name == BF16_PARAMS:
        to_bfloat16(model)
    model = model.to(device)
    check_device(model, device)
    return model


def build_flops(
    config: Config, task: Task, datasets: Datasets, model: nn.Module, dtype: torch.dtype
) -> ModelFlops | None:
    """Return the FLOPs of the model and the device; None unless both are known.

    Args:
        dtype: dtype of matrix products.
    """
    device = next(model.parameters()).device
    if config.batch.max_tokens:
        return None  # micro-batches differ
    peak = config.telemetry.peak_flops or peak_of(device, dtype)
    samples = config.batch.micro_samples
    flops = count(task, model, datasets.train, samples) if peak else None
    return ModelFlops(flops / samples, peak) if peak and flops else None


def build_run_optimizer(config: Config, task: Task, model: nn.Module) -> Optimizer:
    """Build the optimizer of the trained parameters of `model`.

    Raises:
        UserError: the optimizer does not fit the model.
    """
    own = optional(task, "optimizer")
    if own is not None:
        return _checked(own(model), model)
    groups = optional(task, "param_groups")
    return build_optimizer(config.optim, model, groups(model) if groups else None)


def _checked(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """Return a task's optimizer if it has all trained parameters of the model, and no others."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    missing = [n for p, n in names.items() if p.requires_grad and p not in own]
    if not own <= names.keys():
        raise UserError(
            "the optimizer has parameters that the model does not have: it must be built from this "
            "model's parameters"
        )
    if missing:
        raise UserError(
            f"the optimizer lacks {len(missing)} trained parameters of the model, such as "
            f"{missing[0]}: give it all of them, or freeze them (requires_grad_(False))"
        )
    return optimizer
