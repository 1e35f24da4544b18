"""Rows of panels of hvdtrain's dashboard, with the query of each line.

make_dashboard.py generates Grafana's JSON from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RUN = 'run="$run"'
RANKS = 'run="$run", rank=~"$rank"'
OWN = 'phase=~"data|forward|backward|optimizer|checkpoint"'
BY_RANK = "rank {{rank}} on {{host}}"
BY_PLACE = f"{{{{axis}}}}, {BY_RANK} (dp {{{{dp}}}} pp {{{{pp}}}} cp {{{{cp}}}} tp {{{{tp}}}})"


@dataclass
class Panel:
    """A panel of the dashboard.

    Args:
        queries: legend -> PromQL.
        width: columns, of 24.
        more: field configuration in addition to the defaults of its type.
    """

    title: str
    description: str
    unit: str
    queries: dict[str, str]
    type: str = "timeseries"
    width: int = 8
    height: int = 8
    more: dict[str, Any] = field(default_factory=dict)


def rate(series: str) -> str:
    return f"rate(hvdtrain_{series}[$__rate_interval])"


def stat(title: str, description: str, unit: str, query: str) -> Panel:
    return Panel(title, description, unit, {"": query}, "stat", width=3, height=4)


STEP_SECONDS = (
    f"max({rate(f'step_duration_seconds_sum{{{RUN}}}')}"
    f" / {rate(f'step_duration_seconds_count{{{RUN}}}')})"
)
PHASES = rate(f"phase_seconds_total{{{RANKS}}}")
OWN_PHASES = rate(f"phase_seconds_total{{{RANKS}, {OWN}}}")
EXPOSED = rate(f'phase_seconds_total{{{RANKS}, phase="comm_exposed"}}')
INFLIGHT = rate(f"comm_inflight_seconds_total{{{RANKS}}}")
BANDWIDTH = f"{rate(f'comm_bytes_total{{{RANKS}}}')} / {INFLIGHT}"
AXES = rate(f'comm_axis_seconds_total{{{RANKS}, axis!="data"}}')
PIPELINE_WAITS = rate(f'comm_axis_seconds_total{{{RANKS}, axis="pipeline"}}')
SCHEDULES = rate(f"pipeline_schedule_seconds_total{{{RANKS}}}")
WORLD = f"hvdtrain_world_size{{{RANKS}}}"
STEP_BUCKETS = f"sum by (le) ({rate(f'step_duration_seconds_bucket{{{RUN}}}')})"
RECOVERY = f"max(hvdtrain_recovery_seconds_sum{{{RUN}}} / hvdtrain_recovery_seconds_count{{{RUN}}})"
SLOW_IS_RED = {
    "color": {"mode": "thresholds"},
    "min": 0,
    "max": 1,
    "thresholds": {
        "mode": "absolute",
        "steps": [
            {"color": "dark-red", "value": None},
            {"color": "orange", "value": 0.5},
            {"color": "yellow", "value": 0.75},
            {"color": "green", "value": 0.9},
        ],
    },
}
STACKED = {"max": 1, "custom": {"fillOpacity": 60, "stacking": {"mode": "normal", "group": "A"}}}
STEPPED = {"decimals": 0, "custom": {"lineInterpolation": "stepAfter"}}

ROWS: dict[str, list[Panel]] = {
    "Overview": [
        stat(
            "Ranks",
            "Number of ranks that train now.",
            "short",
            f"max(hvdtrain_world_size{{{RUN}}})",
        ),
        stat(
            "Throughput",
            "Samples per second of the whole run.",
            "suffix: samples/s",
            f"max({rate(f'samples_total{{{RUN}}}')})",
        ),
        stat("Step time", "Mean wall time of an optimizer step.", "s", STEP_SECONDS),
        stat("Loss", "Training loss of the last step.", "short", f"max(hvdtrain_loss{{{RUN}}})"),
        stat(
            "Since the last step",
            "It grows while the run makes no progress.",
            "s",
            f"time() - max(hvdtrain_last_step_timestamp_seconds{{{RUN}}})",
        ),
        stat(
            "Since the last checkpoint",
            "Time that would be lost by a crash now.",
            "s",
            f"time() - max(hvdtrain_last_checkpoint_timestamp_seconds{{{RUN}}})",
        ),
        stat(
            "Restarts",
            "Generations of the run after its first one, since its first start.",
            "short",
            f"max(hvdtrain_restarts_total{{{RUN}}})",
        ),
        stat(
            "Exporters",
            "Ranks that Prometheus scrapes successfully.",
            "short",
            f'sum(up{{job="hvdtrain", {RUN}}})',
        ),
    ],
    "Throughput and loss": [
        Panel(
            "Throughput of the run",
            "Samples per second over all ranks; all ranks report the same value.",
            "suffix: samples/s",
            {"run": f"max({rate(f'samples_total{{{RUN}}}')})"},
        ),
        Panel(
            "Throughput by rank",
            "Throughput that each rank would reach without waiting for other ranks: its fraction "
            "of the samples / its own compute time. The lowest rank limits the run.",
            "suffix: samples/s",
            {
                BY_RANK: f"{rate(f'samples_total{{{RANKS}}}')} / {WORLD}"
                f" / sum without (phase) ({OWN_PHASES})"
            },
        ),
        Panel(
            "Step duration",
            "Median and 99th percentile of the step's wall time, from the buckets of a histogram.",
            "s",
            {
                "median": f"histogram_quantile(0.5, {STEP_BUCKETS})",
                "99%": f"histogram_quantile(0.99, {STEP_BUCKETS})",
            },
        ),
        Panel(
            "Loss",
            "Training loss of the global batch.",
            "short",
            {"loss": f"max(hvdtrain_loss{{{RUN}}})"},
            width=5,
        ),
        Panel(
            "Gradient norm",
            "Gradient norm before clipping.",
            "short",
            {"norm": f"max(hvdtrain_grad_norm{{{RUN}}})"},
            width=5,
        ),
        Panel(
            "Learning rate",
            "Learning rate of the last step.",
            "sci",
            {"rate": f"max(hvdtrain_learning_rate{{{RUN}}})"},
            width=5,
        ),
        Panel(
            "Loss scale",
            "Loss scale of precision.name fp16; 1 without it. It halves when gradients overflow, "
            "and doubles after 1000 steps without overflow. Steps skipped at 1 have another cause.",
            "short",
            {"scale": f"max(hvdtrain_loss_scale{{{RUN}}})"},
            width=4,
            more=STEPPED,
        ),
        Panel(
            "Skipped steps, healed ranks, replays",
            "Steps skipped because their gradient was not finite, loss spikes (train.spike), ranks "
            "whose state differed from the majority and was replaced, and replayed micro-batches "
            "whose gradient differed.",
            "short",
            {
                "skipped": f"max(increase(hvdtrain_nonfinite_total{{{RUN}}}[$__rate_interval]))",
                "healed": "max(increase("
                f"hvdtrain_replicas_healed_total{{{RUN}}}[$__rate_interval]))",
                "loss spikes": "max(increase("
                f"hvdtrain_loss_spikes_total{{{RUN}}}[$__rate_interval]))",
                "replays that differed": "max(increase("
                f"hvdtrain_replays_differed_total{{{RUN}}}[$__rate_interval]))",
            },
            width=5,
        ),
    ],
    "Phases": [
        Panel(
            "Where the time goes",
            "Fraction of time in each phase, as a mean over the selected ranks. Phases are "
            "disjoint and add up to the wall time.",
            "percentunit",
            {"{{phase}}": f"avg by (phase) ({PHASES})"},
            width=12,
            more=STACKED,
        ),
        Panel(
            "Own time per step, by rank",
            "Time of each rank in data, forward, backward, optimizer and checkpoint, without waits "
            "for other ranks.",
            "s",
            {
                BY_RANK: f"sum by (rank, host) ({OWN_PHASES})"
                f" / sum by (rank, host) ({rate(f'steps_total{{{RANKS}}}')})"
            },
            width=12,
        ),
    ],
    "Communication": [
        Panel(
            "Exposed communication, by rank",
            "Fraction of the time in which a rank waits for gradient synchronization. The slowest "
            "rank waits least.",
            "percentunit",
            {BY_RANK: f"sum by (rank, host) ({EXPOSED}) / sum by (rank, host) ({PHASES})"},
        ),
        Panel(
            "Overlap, by rank",
            "Fraction of the communication that is hidden behind the backward pass: 1 - exposed / "
            "in flight.",
            "percentunit",
            {
                BY_RANK: f"1 - sum by (rank, host) ({EXPOSED})"
                f" / (sum by (rank, host) ({INFLIGHT}) > 0)"
            },
        ),
        Panel(
            "Bandwidth",
            "Bytes of the gradients / time in flight (algorithm), and times 2(n-1)/n (bus), which "
            "is comparable with the network's. A lower bound: the time includes waits.",
            "Bps",
            {
                "algorithm": f"max({BANDWIDTH})",
                "bus": f"max({BANDWIDTH} * 2 * ({WORLD} - 1) / {WORLD})",
            },
        ),
        Panel(
            "Compression",
            "Bytes of the gradients / bytes that were sent.",
            "short",
            {
                "ratio": f"max(hvdtrain_gradient_bytes{{{RANKS}}}"
                f" * {rate(f'steps_total{{{RANKS}}}')} / {rate(f'comm_bytes_total{{{RANKS}}}')})"
            },
        ),
        Panel(
            "Residual of error feedback, by rank",
            "Norm of the residual, which compression has omitted and later steps add, / norm of "
            "the gradient. It levels off; if it keeps growing, the compression is too strong.",
            "short",
            {
                BY_RANK: f"max by (rank, host) (hvdtrain_residual_norm{{{RANKS}}}"
                f" / hvdtrain_grad_norm{{{RANKS}}})"
            },
        ),
        Panel(
            "Steps since the last synchronization",
            "With exchange.sync_every ranks take local steps in between; after a failure the run "
            "repeats these steps.",
            "short",
            {"steps": f"max(hvdtrain_last_step{{{RUN}}}) - max(hvdtrain_last_sync_step{{{RUN}}})"},
            more=STEPPED,
        ),
    ],
    "Models that span ranks": [
        Panel(
            "Waits within a replica, by rank",
            "Fraction of the time in which a rank waits for the other ranks of its replica, along "
            "each axis for which waits are measured. Zero if each rank holds the whole model.",
            "percentunit",
            {BY_PLACE: f"sum by (axis, rank, host, dp, pp, cp, tp) ({AXES})"},
            width=12,
        ),
        Panel(
            "Pipeline bubble",
            "Fraction of the time in pipeline schedules in which ranks wait, and the fraction for "
            "equally fast stages: if it is far higher, one stage has more work than the others.",
            "percentunit",
            {
                "measured": f"sum({PIPELINE_WAITS}) / sum({SCHEDULES})",
                "formula": f"max(hvdtrain_pipeline_bubble_formula{{{RUN}}})",
            },
            width=12,
        ),
    ],
    "Stragglers": [
        Panel(
            "Straggler heat map",
            "Score of each rank over time: own time of the fastest rank with the same work / own "
            "time of this rank. Red is slow.",
            "percentunit",
            {BY_RANK: f"max by (rank, host) (hvdtrain_straggler_score{{{RANKS}}})"},
            type="status-history",
            width=16,
            more=SLOW_IS_RED,
        ),
        Panel(
            "Slow ranks",
            "Number of ranks that are reported as stragglers now, by the phase in which they lose "
            "most.",
            "short",
            {"{{phase}}": f"sum by (phase) (hvdtrain_straggler{{{RUN}}})"},
            more=STEPPED,
        ),
        Panel(
            "Micro-batches per step, by rank",
            "Number of micro-batches of each rank; with batch.deal speed slow ranks get fewer.",
            "short",
            {BY_RANK: f"max by (rank, host) (hvdtrain_micro_batches{{{RANKS}}})"},
            width=24,
            more=STEPPED,
        ),
    ],
    "Recovery and restarts": [
        Panel(
            "Ranks",
            "Ranks that train, and exporters that respond.",
            "short",
            {
                "train": f"max(hvdtrain_world_size{{{RUN}}})",
                "answer": f'sum(up{{job="hvdtrain", {RUN}}})',
            },
            width=6,
            more=STEPPED,
        ),
        Panel(
            "Ranks by host",
            "Number of ranks per host, as published by rank 0.",
            "short",
            {"{{host}}": f'count by (host) (up{{job="hvdtrain", {RUN}}})'},
            width=6,
            more=STEPPED,
        ),
        Panel(
            "Recovery time",
            "Time from a failure to the end of the next step; mean over the current processes.",
            "s",
            {"mean": RECOVERY},
            width=6,
        ),
        Panel(
            "Restarts and repeated steps",
            "Totals since the run's first start, from its ledger.",
            "short",
            {
                "restarts": f"max(hvdtrain_restarts_total{{{RUN}}})",
                "repeated steps": f"max(hvdtrain_lost_steps_total{{{RUN}}})",
            },
            width=6,
            more=STEPPED,
        ),
    ],
    "Checkpoints": [
        Panel(
            "Age of the newest checkpoint",
            "Time since the newest checkpoint; it drops to 0 with each checkpoint.",
            "s",
            {"age": f"time() - max(hvdtrain_last_checkpoint_timestamp_seconds{{{RUN}}})"},
            width=6,
        ),
        Panel(
            "Step of the newest checkpoint",
            "Step from which the run would resume.",
            "short",
            {"step": f"max(hvdtrain_last_checkpoint_step{{{RUN}}})"},
            width=6,
            more=STEPPED,
        ),
        Panel(
            "Checkpoint time",
            "Time in which the newest checkpoint was written in the background, and the fraction "
            "of the time in which steps wait for copies of the state.",
            "s",
            {
                "written in": f"max(hvdtrain_last_checkpoint_write_seconds{{{RUN}}})",
                "step delay per second": f"max({rate(f'checkpoint_stall_seconds_total{{{RUN}}}')})",
            },
            width=6,
        ),
        Panel(
            "Failed checkpoints",
            "Checkpoints that could not be written, per interval between two points.",
            "short",
            {
                "failed": "max(increase("
                f"hvdtrain_checkpoint_failures_total{{{RUN}}}[$__rate_interval]))"
            },
            width=6,
        ),
    ],
    "Devices": [
        Panel(
            "Model FLOPs utilization",
            "FLOP/s of the model's matrix products / peak FLOP/s of all devices. Empty if a "
            "device's peak is unknown (telemetry.peak_flops).",
            "percentunit",
            {"MFU": f"max(hvdtrain_mfu{{{RUN}}})"},
            width=6,
        ),
        Panel(
            "GPU utilization, by rank",
            "Fraction of the time in which the GPU executed a kernel. Empty without NVML.",
            "percentunit",
            {BY_RANK: f"max by (rank, host) (hvdtrain_gpu_utilization{{{RANKS}}})"},
            width=6,
        ),
        Panel(
            "GPU power, by rank",
            "Power draw of each rank's GPU. Empty without NVML.",
            "watt",
            {BY_RANK: f"max by (rank, host) (hvdtrain_gpu_power_watts{{{RANKS}}})"},
            width=6,
        ),
        Panel(
            "GPU clock, by rank",
            "Clock of the multiprocessors: if it drops, the GPU is hot or limited in power. Empty "
            "without NVML.",
            "hertz",
            {BY_RANK: f"max by (rank, host) (hvdtrain_gpu_clock_hertz{{{RANKS}}})"},
            width=6,
        ),
    ],
    "Memory": [
        Panel(
            "Host memory, by rank",
            "Resident memory of each rank's process, and its peak.",
            "bytes",
            {
                BY_RANK: f"max by (rank, host) (hvdtrain_host_memory_bytes{{{RANKS}}})",
                f"{BY_RANK}, peak": (
                    f"max by (rank, host) (hvdtrain_host_memory_peak_bytes{{{RANKS}}})"
                ),
            },
            width=8,
        ),
        Panel(
            "Device memory, by rank",
            "Memory of tensors on each rank's GPU, its peak, and the memory that the allocator "
            "reserves: far more than the peak means fragmentation. 0 without a GPU.",
            "bytes",
            {
                BY_RANK: f"max by (rank, host) (hvdtrain_device_memory_bytes{{{RANKS}}})",
                f"{BY_RANK}, peak": (
                    f"max by (rank, host) (hvdtrain_device_memory_peak_bytes{{{RANKS}}})"
                ),
                f"{BY_RANK}, reserved": (
                    f"max by (rank, host) (hvdtrain_device_memory_reserved_bytes{{{RANKS}}})"
                ),
            },
            width=8,
        ),
        Panel(
            "Peak memory by phase",
            "Peak of the rank with the most memory, in the steps that the ranks compare: resident "
            "on the host, and of tensors on the device (0 without a GPU).",
            "bytes",
            {
                "{{phase}}, host": (
                    f"max by (phase) (hvdtrain_phase_host_memory_peak_bytes{{{RANKS}}})"
                ),
                "{{phase}}, device": (
                    f"max by (phase) (hvdtrain_phase_device_memory_peak_bytes{{{RANKS}}})"
                ),
            },
            width=8,
        ),
    ],
}
