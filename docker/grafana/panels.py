"""What the dashboard of hvdtrain shows: its rows of panels, and the query behind each line.

make_dashboard.py makes from it what Grafana reads.
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
    """Args: queries: legend -> PromQL; width: of 24; more: beside what all of its type have."""

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
        stat("Ranks", "How many train now.", "short", f"max(hvdtrain_world_size{{{RUN}}})"),
        stat(
            "Throughput",
            "Samples a second of the whole run.",
            "suffix: samples/s",
            f"max({rate(f'samples_total{{{RUN}}}')})",
        ),
        stat("Time of a step", "Mean wall time of an optimizer step.", "s", STEP_SECONDS),
        stat("Loss", "Training loss of the last step.", "short", f"max(hvdtrain_loss{{{RUN}}})"),
        stat(
            "Since the last step",
            "It grows where the run stands still.",
            "s",
            f"time() - max(hvdtrain_last_step_timestamp_seconds{{{RUN}}})",
        ),
        stat(
            "Since the last checkpoint",
            "What a crash would lose now.",
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
            "Ranks whose figures Prometheus gets.",
            "short",
            f'sum(up{{job="hvdtrain", {RUN}}})',
        ),
    ],
    "Throughput and loss": [
        Panel(
            "Throughput of the run",
            "Samples a second over all ranks: equal on all of them.",
            "suffix: samples/s",
            {"run": f"max({rate(f'samples_total{{{RUN}}}')})"},
        ),
        Panel(
            "Throughput by rank",
            "What each rank could do without waiting for others: its fraction of the samples, for "
            "each second of its own part of a step. The lowest one holds up the run.",
            "suffix: samples/s",
            {
                BY_RANK: f"{rate(f'samples_total{{{RANKS}}}')} / {WORLD}"
                f" / sum without (phase) ({OWN_PHASES})"
            },
        ),
        Panel(
            "Steps by duration",
            "Median and 99th percentile of the wall time of a step, from the buckets of a "
            "histogram.",
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
            "Before clipping.",
            "short",
            {"norm": f"max(hvdtrain_grad_norm{{{RUN}}})"},
            width=5,
        ),
        Panel(
            "Learning rate",
            "Of the last step.",
            "sci",
            {"rate": f"max(hvdtrain_learning_rate{{{RUN}}})"},
            width=5,
        ),
        Panel(
            "Loss scale",
            "Of precision.name fp16, 1 without it. It halves when gradients overflow, and doubles "
            "after 1000 steps without; steps at 1 that are skipped are due to something else.",
            "short",
            {"scale": f"max(hvdtrain_loss_scale{{{RUN}}})"},
            width=4,
            more=STEPPED,
        ),
        Panel(
            "Skipped steps, healed ranks",
            "Steps left out because their gradient was not finite, and ranks whose state "
            "differed from the others' and was replaced.",
            "short",
            {
                "skipped": f"max(increase(hvdtrain_nonfinite_total{{{RUN}}}[$__rate_interval]))",
                "healed": "max(increase("
                f"hvdtrain_replicas_healed_total{{{RUN}}}[$__rate_interval]))",
            },
            width=5,
        ),
    ],
    "Phases": [
        Panel(
            "Where the time goes",
            "Share of each phase, as a mean over the chosen ranks. Phases are disjoint and add up "
            "to the wall time.",
            "percentunit",
            {"{{phase}}": f"avg by (phase) ({PHASES})"},
            width=12,
            more=STACKED,
        ),
        Panel(
            "Own time of a step, by rank",
            "Data, forward, backward, optimizer and checkpoint of a rank itself, without waiting "
            "for others.",
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
            "Share of the time in which a rank waits for the exchange of gradients. The slowest "
            "rank waits least.",
            "percentunit",
            {BY_RANK: f"sum by (rank, host) ({EXPOSED}) / sum by (rank, host) ({PHASES})"},
        ),
        Panel(
            "Overlap, by rank",
            "Share of the communication that is hidden behind the backward pass: 1 - exposed / "
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
            "can be compared with the network's. A lower bound: the time holds waiting, too.",
            "Bps",
            {
                "algorithm": f"max({BANDWIDTH})",
                "bus": f"max({BANDWIDTH} * 2 * ({WORLD} - 1) / {WORLD})",
            },
        ),
        Panel(
            "Compression",
            "Bytes of the gradients / bytes that travelled.",
            "short",
            {
                "ratio": f"max(hvdtrain_gradient_bytes{{{RANKS}}}"
                f" * {rate(f'steps_total{{{RANKS}}}')} / {rate(f'comm_bytes_total{{{RANKS}}}')})"
            },
        ),
        Panel(
            "Residual of error feedback, by rank",
            "Norm of what a compression has left out and later steps make good, / that of the "
            "gradient. It settles; where it grows without end, the compression is too strong.",
            "short",
            {
                BY_RANK: f"max by (rank, host) (hvdtrain_residual_norm{{{RANKS}}}"
                f" / hvdtrain_grad_norm{{{RANKS}}})"
            },
        ),
        Panel(
            "Steps since the last synchronisation",
            "With exchange.sync_every ranks step on their own in between: a failure takes the run "
            "back so far.",
            "short",
            {"steps": f"max(hvdtrain_last_step{{{RUN}}}) - max(hvdtrain_last_sync_step{{{RUN}}})"},
            more=STEPPED,
        ),
    ],
    "Models that span ranks": [
        Panel(
            "Waiting for the rest of the model, by rank",
            "Share of the time in which a rank waits for the others of its replica, along each "
            "axis for which that is measured. Zero where each rank holds the whole model.",
            "percentunit",
            {BY_PLACE: f"sum by (axis, rank, host, dp, pp, cp, tp) ({AXES})"},
            width=12,
        ),
        Panel(
            "Pipeline bubble",
            "Share of the time in a pipeline's schedules in which ranks wait, and what it would be "
            "were all stages as fast: where it is far above that, one stage has more to do.",
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
            "Score of each rank over time: own time of the fastest rank with the same work / this "
            "rank's. Red is slow.",
            "percentunit",
            {BY_RANK: f"max by (rank, host) (hvdtrain_straggler_score{{{RANKS}}})"},
            type="status-history",
            width=16,
            more=SLOW_IS_RED,
        ),
        Panel(
            "Slow ranks",
            "How many ranks are called stragglers now, by the phase in which they lose most.",
            "short",
            {"{{phase}}": f"sum by (phase) (hvdtrain_straggler{{{RUN}}})"},
            more=STEPPED,
        ),
        Panel(
            "Micro-batches of a step, by rank",
            "How many each rank works on; with batch.deal speed slow ranks get fewer.",
            "short",
            {BY_RANK: f"max by (rank, host) (hvdtrain_micro_batches{{{RANKS}}})"},
            width=24,
            more=STEPPED,
        ),
    ],
    "Recovery and restarts": [
        Panel(
            "Ranks",
            "Ranks that train, and exporters that answer.",
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
            "As rank 0 has published them.",
            "short",
            {"{{host}}": f'count by (host) (up{{job="hvdtrain", {RUN}}})'},
            width=6,
            more=STEPPED,
        ),
        Panel(
            "Time to recover",
            "From a failure to the end of the next step; mean of the processes that live now.",
            "s",
            {"mean": RECOVERY},
            width=6,
        ),
        Panel(
            "Restarts and steps done again",
            "Since the run's first start, as its ledger has them.",
            "short",
            {
                "restarts": f"max(hvdtrain_restarts_total{{{RUN}}})",
                "steps done again": f"max(hvdtrain_lost_steps_total{{{RUN}}})",
            },
            width=6,
            more=STEPPED,
        ),
    ],
    "Checkpoints": [
        Panel(
            "Age of the newest checkpoint",
            "A saw: it falls with each checkpoint.",
            "s",
            {"age": f"time() - max(hvdtrain_last_checkpoint_timestamp_seconds{{{RUN}}})"},
            width=6,
        ),
        Panel(
            "Step of the newest checkpoint",
            "From which the run would go on.",
            "short",
            {"step": f"max(hvdtrain_last_checkpoint_step{{{RUN}}})"},
            width=6,
            more=STEPPED,
        ),
        Panel(
            "Time for a checkpoint",
            "How long the newest one took to be written, beside the steps, and for which fraction "
            "of the time steps are held up by copies of the state.",
            "s",
            {
                "written in": f"max(hvdtrain_last_checkpoint_write_seconds{{{RUN}}})",
                "held up, per second": f"max({rate(f'checkpoint_stall_seconds_total{{{RUN}}}')})",
            },
            width=6,
        ),
        Panel(
            "Checkpoints that failed",
            "Could not be written, within the time between two points.",
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
            "Model FLOPs utilisation",
            "FLOP/s of the model's matrix products / what all devices can do at most. Empty where "
            "the peak of a device is not known (telemetry.peak_flops).",
            "percentunit",
            {"MFU": f"max(hvdtrain_mfu{{{RUN}}})"},
            width=6,
        ),
        Panel(
            "GPU utilisation, by rank",
            "Share of the time in which the GPU computed anything. Empty without NVML.",
            "percentunit",
            {BY_RANK: f"max by (rank, host) (hvdtrain_gpu_utilization{{{RANKS}}})"},
            width=6,
        ),
        Panel(
            "GPU power, by rank",
            "What each rank's GPU draws. Empty without NVML.",
            "watt",
            {BY_RANK: f"max by (rank, host) (hvdtrain_gpu_power_watts{{{RANKS}}})"},
            width=6,
        ),
        Panel(
            "GPU clock, by rank",
            "Of the multiprocessors: where it falls, the GPU is hot or short of power. Empty "
            "without NVML.",
            "hertz",
            {BY_RANK: f"max by (rank, host) (hvdtrain_gpu_clock_hertz{{{RANKS}}})"},
            width=6,
        ),
    ],
    "Memory": [
        Panel(
            "Memory of the host, by rank",
            "Resident memory of each rank's process, and the most that it had.",
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
            "Memory of the device, by rank",
            "What tensors take up on each rank's GPU, the most that they did, and what the "
            "allocator keeps: far more than the peak means gaps. 0 without a GPU.",
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
            "Most memory by phase",
            "Of the rank that had most, in the steps that the ranks compare: resident on the host, "
            "taken up by tensors on the device (0 without a GPU).",
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
