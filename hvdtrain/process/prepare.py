"""Objects that a process builds before it knows the other ranks, and keeps until its end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hvdtrain import comm
from hvdtrain.config import Config, Settings
from hvdtrain.data.loader import has_own_order
from hvdtrain.data.mixture import Mixture
from hvdtrain.data.sample_facts import SampleFacts, described
from hvdtrain.data.samples import UNSEEDED, facts_of, open_files
from hvdtrain.data.stream import Position, StreamState
from hvdtrain.elastic.status import Identity
from hvdtrain.engine.loop import Progress
from hvdtrain.engine.memory import CompileClock
from hvdtrain.errors import UserError
from hvdtrain.exchange.base import Exchange
from hvdtrain.log import logger
from hvdtrain.optim.precision import Precision, build_precision
from hvdtrain.process.data import build_data
from hvdtrain.process.exporting import Exported, build_exporter
from hvdtrain.process.resolve import Resolved, RunBuckets, resolve
from hvdtrain.runtime import environment
from hvdtrain.runtime.collectives import on_all_ranks
from hvdtrain.runtime.device import (
    choose_device,
    choose_kernels,
    rounding,
    use_deterministic_kernels,
)
from hvdtrain.runtime.memory import PeakMemory
from hvdtrain.runtime.mesh import Topology
from hvdtrain.runtime.phases import PhaseTimer, cuda_event
from hvdtrain.tasks import Datasets, Task, optional
from hvdtrain.telemetry.exporter import Exporter

# Optimizers that multiply matrices, sum along them or use bitsandbytes: on CUDA, these choose
# kernels by the GPU's model.
_BY_GPU = ("muon", "adafactor", "adamw8bit")


@dataclass(frozen=True)
class Start:
    """How this process was started.

    Args:
        clock: time.perf_counter() at its start.
        local_rank: its local rank at its start; local ranks change in an elastic run.
        elastic: processes may join and leave.
    """

    clock: float
    local_rank: int
    elastic: bool = False


@dataclass
class Prepared:
    """Objects of this process for all generations.

    Args:
        resolved: the configuration, with the values derived from ranks and data.
        stream: position of the training data, if it is iterable and can save it.
        samples: facts of the training data, if it is map-style and has no fingerprint.
        progress: the only record of the run's progress.
    """

    resolved: Resolved
    start: Start
    task: Task
    datasets: Datasets
    device: torch.device
    precision: Precision
    timer: PhaseTimer
    memory: PeakMemory
    stream: StreamState | None
    samples: SampleFacts | None
    progress: Progress = field(default_factory=Progress)
    exporter: Exporter | None = field(init=False, default=None)
    _exported: Exported | None = field(init=False, default=None)

    @property
    def config(self) -> Config:
        return self.resolved.config

    @property
    def buckets(self) -> RunBuckets:
        return self.resolved.buckets

    def identity(self, digest: str) -> Identity:
        """Return the identity of this process, which must be equal on all processes of a run.

        Args:
            digest: digest of the configuration.
        """
        size, fingerprint = self.resolved.epoch_samples, self.datasets.fingerprint
        rounded = rounding(self.device, *_kernels(self.task, self.config))
        name = self.precision.name
        samples = self.samples.to_json() if self.samples is not None else ""
        return Identity(self.device.type, digest, size, fingerprint, name, rounded, samples)

    def export(
        self, config: Config, exchange: Exchange, compiled: CompileClock | None
    ) -> Exporter | None:
        """Return the exporter of this process, which from now on exports metrics of `exchange`.

        Raises:
            UserError: as build_exporter.
        """
        if self._exported is None:
            self._exported = Exported(
                exchange,
                self.timer,
                self.memory,
                self.precision.loss_scale,
                compiled,
                self.progress,
            )
            local_rank = self.start.local_rank
            self.exporter = build_exporter(config, local_rank, self.device, self._exported)
        else:
            self._exported.follow(exchange)
        return self.exporter


def _kernels(task: Task, config: Config) -> tuple[bool, bool]:
    """Whether the optimizer multiplies matrices, and whether its kernels depend on the GPU."""
    script = optional(task, "script_state")
    if script is None:
        return config.optim.name == "muon", config.optim.name in _BY_GPU
    # What an optimizer of another package computes is unknown.
    elementwise = script.has_elementwise_optimizer
    return not elementwise, not elementwise


def prepare_environment(config: Config) -> None:
    """Set the environment that Horovod and MPI read when they start, as configured."""
    choose_kernels()
    environment.prepare(
        timeout_seconds=config.elastic.timeout_seconds,
        timeline=config.profile.steps is not None,
        hierarchical=config.exchange.hierarchical,
        process_sets=config.parallel.spans_ranks,
    )


def prepare(
    settings: Settings,
    topology: Topology,
    start: Start,
    data: tuple[Task, Datasets] | None = None,
) -> Prepared:
    """Prepare device, precision, data and timers; each on all ranks, or on no rank.

    Args:
        data: the task and its datasets, if the caller has them already.

    Raises:
        AgreedError: a rank cannot build one.
    """
    # In an elastic run local ranks change, but a process keeps its GPU.
    device_index = start.local_rank if start.elastic else None
    wanted = settings.config.runtime.device
    device = on_all_ranks("device", lambda: choose_device(topology, wanted, device_index))
    if settings.config.exchange.exact:
        use_deterministic_kernels(device)
    precision = on_all_ranks("precision", lambda: _build_precision(settings.config, device))
    timer = _build_timer(start.clock, device)
    comm.COLLECTIVES.begin_run(timer, settings.config.exchange.exact)

    def read_data() -> tuple[Task, Datasets, Resolved]:
        task, datasets = data or build_data(settings)
        return task, datasets, resolve(settings, topology, datasets)

    task, datasets, resolved = on_all_ranks("data", read_data)
    memory = PeakMemory(device, timer)
    stream = on_all_ranks("data_position", lambda: _build_stream(settings.config, datasets))
    samples = on_all_ranks("samples", lambda: _read_samples(settings.config, datasets))
    if samples is not None and samples.unseeded and topology.rank == 0:
        logger.warning(UNSEEDED, described("0", samples.unseeded[0]))
    workers = settings.config.loader.workers
    if workers and topology.rank == 0 and (files := open_files(datasets.train)):
        logger.warning(
            "%s is an open file: the data workers (loader.workers %d) share it and its position, "
            "so one may read what another has sought. Open it at the first access in __getitem__",
            ", ".join(files),
            workers,
        )
    return Prepared(
        resolved, start, task, datasets, device, precision, timer, memory, stream, samples
    )


def _build_precision(config: Config, device: torch.device) -> Precision:
    """Build the precision, and check what `auto` selects on this device like a configured name.

    Raises:
        UserError: the configuration excludes it.
    """
    precision = build_precision(config.precision, device)
    if config.precision.name != "auto":
        return precision
    chosen: Any = precision.name
    try:
        replace(config, precision=replace(config.precision, name=chosen))
    except ValueError as error:
        raise UserError(f"precision.name auto is {precision.name} here: {error}") from None
    return precision


def _read_samples(config: Config, datasets: Datasets) -> SampleFacts | None:
    train = datasets.train
    unknown = isinstance(train, Mixture) and train.has_unknown_sources
    if has_own_order(train) or (datasets.fingerprint is not None and not unknown):
        return None
    return facts_of(datasets.train, config.seed, config.loader)


def _build_stream(config: Config, datasets: Datasets) -> StreamState | None:
    """Return the position of the training data at its start, if it is part of the run's state."""
    if not has_own_order(datasets.train):
        return None
    # With workers, this process never reads it: it always is as it was built.
    return StreamState(None if config.loader.workers else Position.first(datasets.train))


def _build_timer(began: float, device: torch.device) -> PhaseTimer:
    """Build the phase timer; `began`: time.perf_counter() at the process's start."""
    timer = PhaseTimer(began)
    if device.type == "cuda":
        timer.use_events(cuda_event)
    return timer
