"""Rows of panels of hvdtrain's dashboard, with the query of each line.

make_dashboard.py generates Grafana's JSON from it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    statushistory,
    text,
    timeseries,
)
from grafana_foundation_sdk.models import common as constants
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import (
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
)

Panel = TypeVar("Panel", bound=Any)

UID = "hvdtrain"
DATASOURCE = constants.DataSourceRef("prometheus", "$datasource")
RUN = 'run="$run"'
RANKS = 'run="$run", rank=~"$rank"'
OWN = 'phase=~"data|forward|backward|optimizer|checkpoint"'
WINDOW = "[$__rate_interval]"
BY_RANK = "rank {{rank}} on {{host}}"
BY_PLACE = f"{{{{axis}}}}, {BY_RANK} (dp {{{{dp}}}} pp {{{{pp}}}} cp {{{{cp}}}} tp {{{{tp}}}})"

# The runbook is part of the dashboard, so links to it work wherever the dashboard is installed. Its
# own links are relative to the repository: only their text is shown.
RUNBOOK = {
    section.split("\n", 1)[0]: section.split("\n", 1)[1].strip()
    for section in re.split(
        "^## ",
        re.sub(
            r"\[([^]]+)\]\([^)]+\)",
            r"\1",
            (Path(__file__).parents[1] / "prometheus/runbook.md").read_text(),
        ),
        flags=re.MULTILINE,
    )[1:]
}
RUNBOOK_IDS = {alert: 1001 + i for i, alert in enumerate(RUNBOOK)}


def panel(
    kind: Panel, title: str, description: str, unit: str, queries: dict[str, str], *alerts: str
) -> Panel:
    """Fill in a panel.

    Args:
        queries: legend -> PromQL.
        alerts: alerts to whose runbook the panel has links.
    """
    kind.title(title).description(description).datasource(DATASOURCE).unit(unit)
    for i, (legend, expr) in enumerate(queries.items()):
        query = prometheus.Dataquery().ref_id(chr(ord("A") + i)).datasource(DATASOURCE)
        kind.with_target(query.expr(expr).legend_format(legend).range())
    if alerts:
        kind.links([runbook_link(alert) for alert in alerts])
    return kind


def runbook_link(alert: str) -> dashboard.DashboardLink:
    url = f"/d/{UID}?viewPanel={RUNBOOK_IDS[alert]}"
    return dashboard.DashboardLink(f"Runbook: {alert}").url(url).target_blank(True)


def tile(
    title: str,
    description: str,
    unit: str,
    query: str,
    *alerts: str,
    steps: dict[float, str] | None = None,
) -> stat.Panel:
    """Build a single value of the overview.

    Args:
        steps: lower limit -> color; below the first limit the value is green. None: no colors.
    """
    made = panel(stat.Panel(), title, description, unit, {"": query}, *alerts).span(3).height(4)
    made.graph_mode(constants.BigValueGraphMode.AREA)
    made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    if steps is None:
        return made.color_mode(constants.BigValueColorMode.NONE)
    return made.color_mode(constants.BigValueColorMode.VALUE).thresholds(thresholds("green", steps))


def lines(
    title: str,
    description: str,
    unit: str,
    queries: dict[str, str],
    *alerts: str,
    width: int = 6,
    line: float | None = None,
) -> timeseries.Panel:
    """Build a panel of curves.

    Args:
        width: columns, of 24.
        line: draws a dashed red line at this value, the threshold of an alert.
    """
    made = panel(timeseries.Panel(), title, description, unit, queries, *alerts)
    made.span(width).height(8).legend(legend())
    made.tooltip(tooltip(constants.TooltipDisplayMode.MULTI))
    if line is not None:
        dashed = constants.GraphThresholdsStyleMode.DASHED
        made.thresholds(thresholds("transparent", {line: "red"}))
        made.thresholds_style(common.GraphThresholdsStyleConfig().mode(dashed))
    return made


def thresholds(base: str, steps: dict[float, str]) -> dashboard.ThresholdsConfig:
    every = [Threshold(None, base), *(Threshold(value, color) for value, color in steps.items())]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(every)


def legend() -> common.VizLegendOptions:
    shown = common.VizLegendOptions().display_mode(constants.LegendDisplayMode.LIST)
    return shown.placement(constants.LegendPlacement.BOTTOM).show_legend(True)


def tooltip(mode: constants.TooltipDisplayMode) -> common.VizTooltipOptions:
    return common.VizTooltipOptions().mode(mode).sort(constants.SortOrder.DESCENDING)


def logarithmic(made: timeseries.Panel, base: int = 10) -> timeseries.Panel:
    scale = common.ScaleDistributionConfig().type(constants.ScaleDistribution.LOG)
    return made.scale_distribution(scale.log(base))


def stepped(made: timeseries.Panel) -> timeseries.Panel:
    """Show counts, which change in steps."""
    return made.decimals(0).line_interpolation(constants.LineInterpolation.STEP_AFTER)


def fraction(made: timeseries.Panel) -> timeseries.Panel:
    return made.min(0).max(1)


def rate(series: str) -> str:
    return f"rate(hvdtrain_{series}{WINDOW})"


def selected(query: str, choose: str, ranking: str = "", by: str = "rank, host") -> str:
    """Restrict a query to the $top ranks, chosen once for the whole time range.

    topk alone chooses again at each point, so a panel would show far more curves.

    Args:
        choose: topk or bottomk.
        ranking: the query by which ranks are compared; default: `query`.
        by: labels that identify a curve's rank.
    """
    whole = (ranking or query).replace(WINDOW, "[$__range] @ end()")
    return f"{query} and on ({by}) {choose}($top, {whole})"


def of_ranks(metric: str, function: str = "avg_over_time") -> str:
    return f"max by (rank, host) ({function}(hvdtrain_{metric}{{{RANKS}}}{WINDOW}))"


def per_rank(series: str) -> str:
    return f"sum by (rank, host) ({rate(series)})"


STEP_SECONDS = (
    f"max({rate(f'step_duration_seconds_sum{{{RUN}}}')}"
    f" / {rate(f'step_duration_seconds_count{{{RUN}}}')})"
)
STEP_BUCKETS = f"sum by (le) ({rate(f'step_duration_seconds_bucket{{{RUN}}}')})"
THROUGHPUT = f"max({rate(f'samples_total{{{RUN}}}')})"
EXPOSED = per_rank(f'phase_seconds_total{{{RANKS}, phase="comm_exposed"}}')
PHASES = per_rank(f"phase_seconds_total{{{RANKS}}}")
INFLIGHT = rate(f"comm_inflight_seconds_total{{{RANKS}}}")
BANDWIDTH = f"{rate(f'comm_bytes_total{{{RANKS}}}')} / {INFLIGHT}"
WORLD = f"hvdtrain_world_size{{{RANKS}}}"
AXES = f'comm_axis_seconds_total{{{RANKS}, axis!="data"}}'
PIPELINE_WAITS = rate(f'comm_axis_seconds_total{{{RANKS}, axis="pipeline"}}')
SCHEDULES = rate(f"pipeline_schedule_seconds_total{{{RANKS}}}")
RECOVERIES = f"(hvdtrain_recovery_seconds_count{{{RUN}}} > 0)"
RECOVERY = f"max(hvdtrain_recovery_seconds_sum{{{RUN}}} / {RECOVERIES})"
FIRING = f'ALERTS{{{RUN}, alertstate="firing", severity="%s"}}'
RANKS_BY_HOST = f'count by (host) (up{{job="hvdtrain", {RUN}}})'
SINCE_STEP = f"time() - max(hvdtrain_last_step_timestamp_seconds{{{RUN}}})"
SINCE_CHECKPOINT = f"time() - max(hvdtrain_last_checkpoint_timestamp_seconds{{{RUN}}})"
LAST_STEP = f"max(hvdtrain_last_step{{{RUN}}})"


def increase(counter: str) -> str:
    return f"max(increase(hvdtrain_{counter}{{{RUN}}}{WINDOW}))"


def alerts_panel() -> statetimeline.Panel:
    made = panel(
        statetimeline.Panel(),
        "Alerts",
        "Alerts of this run that fire. The runbook is in the last row, and in this panel's links. "
        "Empty if Prometheus does not evaluate the rules in docker/prometheus/rules.",
        units.Short,
        {
            "{{alertname}}": f"max by (alertname) ({FIRING % 'info'} or 2 * {FIRING % 'warning'}"
            f" or 3 * {FIRING % 'critical'})"
        },
        *RUNBOOK,
    )
    severities = {
        "1": ValueMappingResult(text="info", color="blue"),
        "2": ValueMappingResult(text="warning", color="orange"),
        "3": ValueMappingResult(text="critical", color="red"),
    }
    made.span(24).height(4).mappings([ValueMap(severities)]).no_value("No alert fires")
    made.show_value(constants.VisibilityMode.AUTO).legend(legend().show_legend(False))
    return made.tooltip(tooltip(constants.TooltipDisplayMode.SINGLE))


def heat_map() -> statushistory.Panel:
    made = panel(
        statushistory.Panel(),
        "Straggler score, by rank",
        "Own time of the fastest rank with the same work / own time of this rank: 1 is as fast as "
        "the fastest rank, and red is slow. The ranks with the lowest scores.",
        units.PercentUnit,
        {
            BY_RANK: selected(
                of_ranks("straggler_score"), "bottomk", of_ranks("straggler_score", "min_over_time")
            )
        },
        "Straggler",
    )
    steps = {0.5: "orange", 0.75: "yellow", 0.9: "green"}
    made.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
    made.thresholds(thresholds("dark-red", steps)).min(0).max(1)
    # Grafana does not draw cells that are narrower than a few pixels.
    made.span(16).height(8).max_data_points(100).row_height(0.9)
    made.show_value(constants.VisibilityMode.NEVER).legend(legend())
    return made.tooltip(tooltip(constants.TooltipDisplayMode.SINGLE))


def runbook_panel(alert: str) -> text.Panel:
    made = text.Panel().id(RUNBOOK_IDS[alert]).title(alert).span(8).height(10)
    made.description(f"What {alert} means and what to do.")
    return made.mode("markdown").content(RUNBOOK[alert])


ROWS: dict[str, list[Any]] = {
    "Overview": [
        tile(
            "Ranks",
            "Number of ranks that train now.",
            units.Short,
            f"max(hvdtrain_world_size{{{RUN}}})",
            "RankMissing",
        ),
        tile(
            "Ranks without metrics",
            "Ranks whose exporter does not respond to Prometheus.",
            units.Short,
            f'sum(up{{job="hvdtrain", {RUN}}} == bool 0)',
            "ExporterDown",
            steps={1: "orange"},
        ),
        tile(
            "Slow ranks",
            "Ranks that are reported as stragglers now; all other ranks wait for them.",
            units.Short,
            f"sum(hvdtrain_straggler{{{RUN}}})",
            "Straggler",
            steps={1: "orange"},
        ),
        tile(
            "Samples per second",
            "Throughput of the whole run.",
            units.Short,
            THROUGHPUT,
            "ThroughputDropped",
        ),
        tile("Step time", "Mean wall time of an optimizer step.", units.Seconds, STEP_SECONDS),
        tile(
            "Since the last step",
            "It grows while the run makes no progress.",
            units.Seconds,
            SINCE_STEP,
            "TrainingStalled",
            steps={60: "orange", 300: "red"},
        ),
        tile(
            "Since the last checkpoint",
            "Time that would be lost if all hosts crashed now.",
            units.Seconds,
            SINCE_CHECKPOINT,
            "CheckpointStale",
        ),
        tile(
            "Restarts",
            "Generations of the run after its first one, since its first start.",
            units.Short,
            f"max(hvdtrain_restarts_total{{{RUN}}})",
        ),
        alerts_panel(),
        lines(
            "Throughput",
            "Samples per second over all ranks.",
            units.Short,
            {"samples/s": THROUGHPUT},
            "ThroughputDropped",
        ).min(0),
        logarithmic(
            lines(
                "Step time, median and 99%",
                "Median and 99th percentile of the step's wall time, from the buckets of a "
                "histogram.",
                units.Seconds,
                {
                    "median": f"histogram_quantile(0.5, {STEP_BUCKETS})",
                    "99%": f"histogram_quantile(0.99, {STEP_BUCKETS})",
                },
            )
        ),
        lines(
            "Loss",
            "Training loss of the global batch.",
            units.Short,
            {"loss": f"max(hvdtrain_loss{{{RUN}}})"},
            "LossNotFinite",
        ),
        fraction(
            lines(
                "Where the time goes",
                "Fraction of time in each phase, as a mean over the selected ranks. Phases are "
                "disjoint and add up to the wall time.",
                units.PercentUnit,
                {"{{phase}}": f"avg by (phase) ({rate(f'phase_seconds_total{{{RANKS}}}')})"},
                "ThroughputDropped",
            )
        )
        .fill_opacity(60)
        .stacking(common.StackingConfig().mode(constants.StackingMode.NORMAL).group("A")),
    ],
    "Training": [
        logarithmic(
            lines(
                "Gradient norm",
                "Gradient norm before clipping.",
                units.Short,
                {"norm": f"max(hvdtrain_grad_norm{{{RUN}}})"},
                "LossNotFinite",
            )
        ),
        lines(
            "Learning rate",
            "Learning rate of the last step.",
            units.ScientificNotation,
            {"rate": f"max(hvdtrain_learning_rate{{{RUN}}})"},
        ),
        stepped(
            logarithmic(
                lines(
                    "Loss scale",
                    "Loss scale of precision.name fp16; 1 without it. It halves when gradients "
                    "overflow, and doubles after 1000 steps without overflow. Steps skipped at 1 "
                    "have another cause.",
                    units.Short,
                    {"scale": f"max(hvdtrain_loss_scale{{{RUN}}})"},
                ),
                base=2,
            )
        ),
        lines(
            "Skipped and repaired steps",
            "Steps skipped because their gradient was not finite, loss spikes (train.spike), ranks "
            "whose state differed from the majority and was replaced, and replayed micro-batches "
            "whose gradient differed; per interval between two points.",
            units.Short,
            {
                "skipped": increase("nonfinite_total"),
                "loss spikes": increase("loss_spikes_total"),
                "healed ranks": increase("replicas_healed_total"),
                "replays that differed": increase("replays_differed_total"),
            },
            "LossNotFinite",
        ).min(0),
    ],
    "Slow ranks": [
        heat_map(),
        stepped(
            lines(
                "Slow ranks by phase",
                "Number of ranks that are reported as stragglers, by the phase in which they lose "
                "most.",
                units.Short,
                {"{{phase}}": f"sum by (phase) (hvdtrain_straggler{{{RUN}}})"},
                "Straggler",
                width=8,
            )
        ).min(0),
        lines(
            "Own time per step, by rank",
            "Time of each rank in data, forward, backward, optimizer and checkpoint, without waits "
            "for other ranks. The ranks with the longest time, which limit the run.",
            units.Seconds,
            {
                BY_RANK: selected(
                    f"{per_rank(f'phase_seconds_total{{{RANKS}, {OWN}}}')}"
                    f" / {per_rank(f'steps_total{{{RANKS}}}')}",
                    "topk",
                )
            },
            "Straggler",
            width=12,
        ).min(0),
        stepped(
            lines(
                "Micro-batches per step, by rank",
                "Number of micro-batches of each rank; with batch.deal speed slow ranks get fewer. "
                "The ranks with the fewest.",
                units.Short,
                {BY_RANK: selected(of_ranks("micro_batches"), "bottomk")},
                width=12,
            )
        ).min(0),
    ],
    "Communication": [
        fraction(
            lines(
                "Exposed communication, by rank",
                "Fraction of the time in which a rank waits for gradient synchronization. The "
                "slowest rank waits least. The ranks that wait least: if even they exceed the "
                "dashed line, the run waits for its network.",
                units.PercentUnit,
                {BY_RANK: selected(f"{EXPOSED} / {PHASES}", "bottomk")},
                "CommunicationBound",
                width=8,
                line=0.4,
            )
        ),
        fraction(
            lines(
                "Overlap, by rank",
                "Fraction of the communication that is hidden behind the backward pass: 1 - "
                "exposed / in flight. The ranks with the lowest overlap.",
                units.PercentUnit,
                {
                    BY_RANK: selected(
                        f"1 - {EXPOSED} / (sum by (rank, host) ({INFLIGHT}) > 0)", "bottomk"
                    )
                },
                width=8,
            )
        ),
        lines(
            "Bandwidth",
            "Bytes of the gradients / time in flight (algorithm), and times 2(n-1)/n (bus), which "
            "is comparable with the network's. A lower bound: the time includes waits.",
            units.BytesPerSecondSI,
            {
                "algorithm": f"max({BANDWIDTH})",
                "bus": f"max({BANDWIDTH} * 2 * ({WORLD} - 1) / {WORLD})",
            },
            "CommunicationBound",
            width=8,
        ).min(0),
        logarithmic(
            lines(
                "Residual of error feedback, by rank",
                "Norm of the residual, which compression has omitted and later steps add, / norm "
                "of the gradient. It levels off; if it keeps growing, the compression is too "
                "strong. The ranks with the largest residual; 0 without compression.",
                units.Short,
                {
                    BY_RANK: selected(
                        f"{of_ranks('residual_norm')} / {of_ranks('grad_norm')}", "topk"
                    )
                },
                "ResidualGrows",
                width=12,
            )
        ),
        stepped(
            lines(
                "Steps since the last synchronization",
                "With exchange.sync_every ranks take local steps in between; after a failure the "
                "run repeats these steps.",
                units.Short,
                {"steps": f"{LAST_STEP} - max(hvdtrain_last_sync_step{{{RUN}}})"},
                width=12,
            )
        ).min(0),
    ],
    "Models that span ranks": [
        fraction(
            lines(
                "Waits within a replica, by rank",
                "Fraction of the time in which a rank waits for the other ranks of its replica, "
                "along each axis for which waits are measured. Zero if each rank holds the whole "
                "model. The ranks that wait most.",
                units.PercentUnit,
                {
                    BY_PLACE: selected(
                        f"sum by (axis, rank, host, dp, pp, cp, tp) ({rate(AXES)})",
                        "topk",
                        per_rank(AXES),
                    )
                },
                width=12,
            )
        ),
        fraction(
            lines(
                "Pipeline bubble",
                "Fraction of the time in pipeline schedules in which ranks wait, and the fraction "
                "for equally fast stages: if it is far higher, one stage has more work than the "
                "others.",
                units.PercentUnit,
                {
                    "measured": f"sum({PIPELINE_WAITS}) / (sum({SCHEDULES}) > 0)",
                    "formula": f"max(hvdtrain_pipeline_bubble_formula{{{RUN}}}) >= 0",
                },
                width=12,
            ).no_value("No pipeline")
        ),
    ],
    "Restarts": [
        stepped(
            lines(
                "Ranks and exporters",
                "Ranks that train, and exporters that respond.",
                units.Short,
                {
                    "train": f"max(hvdtrain_world_size{{{RUN}}})",
                    "respond": f'sum(up{{job="hvdtrain", {RUN}}})',
                },
                "RankMissing",
                "ExporterDown",
            )
        ).min(0),
        stepped(
            lines(
                "Ranks by host",
                "Number of ranks per host, as published by rank 0. The hosts with the fewest "
                "ranks.",
                units.Short,
                {
                    "{{host}}": selected(
                        RANKS_BY_HOST,
                        "bottomk",
                        f"min_over_time({RANKS_BY_HOST}[$__range:$__interval] @ end())",
                        by="host",
                    )
                },
                "RankMissing",
            )
        ).min(0),
        lines(
            "Recovery time",
            "Time from a failure to the end of the next step; mean over the current processes.",
            units.Seconds,
            {"mean": RECOVERY},
        )
        .min(0)
        .no_value("No recovery yet"),
        stepped(
            lines(
                "Restarts and repeated steps",
                "Totals since the run's first start, from its ledger.",
                units.Short,
                {
                    "restarts": f"max(hvdtrain_restarts_total{{{RUN}}})",
                    "repeated steps": f"max(hvdtrain_lost_steps_total{{{RUN}}})",
                },
            )
        ).min(0),
    ],
    "Checkpoints": [
        stepped(
            lines(
                "Steps that a crash would repeat",
                "Steps since the newest checkpoint and, with checkpoint.memory, since the newest "
                "copy in the memory of another host.",
                units.Short,
                {
                    "since the checkpoint": f"{LAST_STEP}"
                    f" - max(hvdtrain_last_checkpoint_step{{{RUN}}})",
                    "since the copy in memory": f"{LAST_STEP}"
                    f" - max(hvdtrain_memory_copy_step{{{RUN}}})",
                },
                "CheckpointStale",
            )
        ).min(0),
        lines(
            "Time to write a checkpoint",
            "Time in which the newest checkpoint was written in the background.",
            units.Seconds,
            {"written in": f"max(hvdtrain_last_checkpoint_write_seconds{{{RUN}}})"},
            "CheckpointStale",
        ).min(0),
        fraction(
            lines(
                "Delay of steps by checkpoints",
                "Fraction of the time in which steps wait for copies of the state.",
                units.PercentUnit,
                {"delay": f"max({rate(f'checkpoint_stall_seconds_total{{{RUN}}}')})"},
            )
        ),
        lines(
            "Failed writes",
            "Checkpoints and other files of the run that could not be written, per interval "
            "between two points.",
            units.Short,
            {
                "checkpoints": increase("checkpoint_failures_total"),
                "other files": increase("file_failures_total"),
            },
            "CheckpointStale",
        ).min(0),
    ],
    "Devices": [
        fraction(
            lines(
                "Model FLOPs utilization",
                "FLOP/s of the model's matrix products / peak FLOP/s of all devices.",
                units.PercentUnit,
                {"MFU": f"max(hvdtrain_mfu{{{RUN}}}) >= 0"},
            )
        ).no_value("Peak FLOP/s unknown: set telemetry.peak_flops"),
        fraction(
            lines(
                "GPU utilization, by rank",
                "Fraction of the time in which the GPU executed a kernel. The least used GPUs.",
                units.PercentUnit,
                {BY_RANK: selected(f"{of_ranks('gpu_utilization')} >= 0", "bottomk")},
            )
        ).no_value("No metrics from NVML"),
        lines(
            "GPU power, by rank",
            "Power draw of each rank's GPU. The GPUs with the highest power.",
            units.Watt,
            {BY_RANK: selected(f"{of_ranks('gpu_power_watts')} >= 0", "topk")},
        )
        .min(0)
        .no_value("No metrics from NVML"),
        lines(
            "GPU clock, by rank",
            "Clock of the multiprocessors: if it drops, the GPU is hot or limited in power. The "
            "slowest GPUs.",
            units.Hertz,
            {BY_RANK: selected(f"{of_ranks('gpu_clock_hertz')} >= 0", "bottomk")},
            "Straggler",
        ).no_value("No metrics from NVML"),
    ],
    "Memory": [
        lines(
            "Host memory, by rank",
            "Resident memory of each rank's process. The ranks with the most.",
            units.BytesIEC,
            {BY_RANK: selected(of_ranks("host_memory_bytes", "max_over_time"), "topk")},
        ).min(0),
        lines(
            "Device memory, by rank",
            "Peak memory of tensors on each rank's GPU; 0 without a GPU. The ranks with the most.",
            units.BytesIEC,
            {BY_RANK: selected(of_ranks("device_memory_peak_bytes", "max_over_time"), "topk")},
        ).min(0),
        lines(
            "Device memory of the fullest rank",
            "Memory of tensors, its peak, and the memory that the allocator reserves: far more "
            "than the peak means fragmentation. 0 without a GPU.",
            units.BytesIEC,
            {
                "tensors": f"max(hvdtrain_device_memory_bytes{{{RANKS}}})",
                "peak": f"max(hvdtrain_device_memory_peak_bytes{{{RANKS}}})",
                "reserved": f"max(hvdtrain_device_memory_reserved_bytes{{{RANKS}}})",
            },
        ).min(0),
        lines(
            "Peak memory by phase",
            "Peak of the rank with the most memory, in the steps that the ranks compare: resident "
            "on the host, and of tensors on the device (0 without a GPU).",
            units.BytesIEC,
            {
                "{{phase}}, host": (
                    f"max by (phase) (hvdtrain_phase_host_memory_peak_bytes{{{RANKS}}})"
                ),
                "{{phase}}, device": (
                    f"max by (phase) (hvdtrain_phase_device_memory_peak_bytes{{{RANKS}}})"
                ),
            },
        ).min(0),
    ],
    "Runbook": [runbook_panel(alert) for alert in RUNBOOK],
}
