"""Metrics that a rank's exporter reads at each scrape; the loop pushes all other metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from hvdtrain import comm
from hvdtrain.config import Config
from hvdtrain.engine.loop import Progress
from hvdtrain.engine.memory import CompileClock
from hvdtrain.exchange.base import Exchange
from hvdtrain.exchange.bucketed import Residuals
from hvdtrain.optim.loss_scale import LossScale
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.memory import PeakMemory
from hvdtrain.runtime.phases import PHASES, PhaseTimer
from hvdtrain.runtime.tensor_shards import local
from hvdtrain.telemetry.exporter import Exporter
from hvdtrain.telemetry.gpu import GAUGES, readings


@dataclass
class Exported:
    """Sources of an exporter's metrics; a later generation may replace the exchange."""

    exchange: Exchange
    timer: PhaseTimer
    memory: PeakMemory
    loss_scale: LossScale | None = None
    compiled: CompileClock | None = None
    progress: Progress = field(default_factory=Progress)

    def follow(self, exchange: Exchange) -> None:
        """Replace the exchange; its counters continue from the last one."""
        exchange.inflight_seconds += self.exchange.inflight_seconds
        exchange.bytes += self.exchange.bytes
        self.exchange = exchange


def build_exporter(
    config: Config, local_rank: int, device: torch.device, of: Exported
) -> Exporter | None:
    """Start this rank's exporter; return None if telemetry is off.

    Raises:
        UserError: the exporter cannot listen on its address, or a file of it cannot be used.
    """
    if config.telemetry.port == 0:
        return None
    exporter = Exporter(config.telemetry, local_rank)
    exporter.watch_totals(
        "phase_seconds", "Wall time of this process by phase", "phase", of.timer.seconds
    )
    exporter.watch_total(
        "comm_inflight_seconds",
        "From the first gradient handed to Horovod to the end of the last, over all steps",
        lambda: of.exchange.inflight_seconds,
    )
    exporter.watch_total(
        "comm_bytes", "Bytes of the gradients that were exchanged", lambda: of.exchange.bytes
    )
    exporter.watch_totals(
        "comm_axis_seconds",
        "Seconds that this rank waited along each axis of a model that spans ranks, transfers "
        "included; data: as comm_inflight_seconds",
        "axis",
        lambda: {"data": of.exchange.inflight_seconds, **of.timer.waited},
    )
    exporter.watch_total(
        "pipeline_schedule_seconds",
        "Seconds in the schedules of a pipeline, in training; 0 without one",
        lambda: of.timer.bubble.schedule_seconds,
    )
    exporter.watch(
        "pipeline_bubble_formula",
        "Fraction of the schedule in which ranks wait if all stages are equally fast; NaN without "
        "a pipeline",
        lambda: of.timer.bubble.formula,
    )
    exporter.watch(
        "gradient_bytes",
        "Bytes of this rank's gradients of a step before any compression",
        lambda: sum(local(p).nbytes for p in of.exchange.parameters),
    )
    exporter.watch(
        "residual_norm",
        "Norm of this rank's residuals (error feedback); 0 without error feedback",
        lambda: sum(p.norm() for p in of.exchange.state_parts() if isinstance(p, Residuals)),
    )
    exporter.watch(
        "loss_scale",
        "Factor of the loss with precision.name fp16; 1 without it",
        lambda: of.loss_scale.value if of.loss_scale else 1.0,
    )
    exporter.watch_total(
        "loss_spikes",
        "Steps of the run whose loss was a spike; 0 without train.spike",
        lambda: of.progress.spikes,
    )
    exporter.watch_total(
        "compile_seconds",
        "Seconds in which this process compiled its model; 0 without compile",
        lambda: of.compiled.seconds if of.compiled else 0.0,
    )
    exporter.watch(
        "stuck_seconds",
        "Seconds for which this rank has made no progress and done no work while others may wait "
        "for it; 0 below 15 s",
        lambda: heartbeat.HEARTBEAT.stuck_seconds,
    )
    for name, total, text in (
        ("collective", "calls", "Collectives of hvdtrain.comm"),
        ("collective_bytes", "bytes", "Bytes of the tensors in collectives of hvdtrain.comm"),
        (
            "collective_seconds",
            "seconds",
            "Seconds in collectives of hvdtrain.comm, including the wait for other ranks",
        ),
    ):
        exporter.watch_totals(name, text, "operation", partial(comm.COLLECTIVES.total_of, total))
    exporter.watch(
        "device_memory_bytes",
        "Device memory allocated to tensors; 0 on the CPU",
        lambda: torch.cuda.memory_allocated(device) if device.type == "cuda" else 0,
    )
    exporter.watch(
        "device_memory_reserved_bytes",
        "Device memory reserved by the allocator; 0 on the CPU",
        lambda: torch.cuda.memory_reserved(device) if device.type == "cuda" else 0,
    )
    exporter.watch(
        "device_memory_peak_bytes",
        "Peak device memory allocated to tensors so far; 0 on the CPU",
        lambda: of.memory.most()[1],
    )
    exporter.watch(
        "host_memory_peak_bytes",
        "Peak resident memory so far",
        lambda: of.memory.most()[0],
    )
    peaks = of.memory.of_run
    for name, text, most in (
        ("host", "resident", peaks.host),
        ("device", "allocated to tensors on the device", peaks.device),
    ):
        exporter.watch_each(
            f"phase_{name}_memory_peak_bytes",
            f"Peak memory {text} in this phase, in the steps that ranks compare",
            "phase",
            partial(_of_phases, most),
        )
    for name, read in readings(device).items():
        exporter.watch(name, GAUGES[name], read)
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


def _of_phases(peaks: dict[str, int]) -> dict[str, int]:
    return {phase: peaks.get(phase, 0) for phase in PHASES}
