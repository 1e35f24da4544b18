"""The Prometheus exporter of one rank, and the file that lists all exporters for Prometheus."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    Metric,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from hvdtrain.files import write_atomic
from hvdtrain.log import logger
from hvdtrain.runtime.mesh import LABELS, Grid
from hvdtrain.telemetry.config import TelemetryConfig
from hvdtrain.telemetry.http_server import MetricsServer
from hvdtrain.telemetry.straggler import KINDS

# From 10 ms (toy models) to minutes (large models on few ranks).
_STEP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180)
_RECOVERY_BUCKETS = (0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 900)
# The job ID in batch systems.
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


class _OnScrape(Collector):
    """Metrics that are read when Prometheus scrapes, at no cost for a step."""

    def __init__(self) -> None:
        self._metrics: dict[str, Callable[[], Metric]] = {}

    def add(self, name: str, metric: Callable[[], Metric]) -> None:
        self._metrics[name] = metric

    def collect(self) -> Iterable[Metric]:
        for metric in list(self._metrics.values()):
            yield metric()


class Exporter:
    """HTTP exporter of this rank's metrics.

    A process has one as long as it trains, through all generations of an elastic run.

    Args:
        config: address and first port.
        local_rank: the port is `config.port` + this; a free one if that is in use.

    Attributes:
        port: on which it listens.
        registry: registry of all metrics.

    Raises:
        UserError: the address cannot be listened on, or a configured file is invalid.
    """

    def __init__(self, config: TelemetryConfig, local_rank: int) -> None:
        disable_created_metrics()
        registry = self.registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"hvdtrain_{name}", text, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"hvdtrain_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"hvdtrain_{name}", text, buckets=buckets, registry=registry)

        self._info = Info("hvdtrain_run", "Facts about the run", registry=registry)
        self._world_size = gauge("world_size", "World size of the run")
        self._steps = counter("steps", "Optimizer steps that this process has completed")
        self._samples = counter("samples", "Samples of these steps, summed over all ranks")
        self._assigned = gauge("micro_batches", "Micro-batches per step assigned to this rank")
        self._nonfinite = counter("nonfinite", "Steps skipped because the gradient was not finite")
        self._healed = counter(
            "replicas_healed", "Ranks whose state differed and was replaced; reported by rank 0"
        )
        self._replays = counter(
            "replays", "Micro-batches whose gradient was computed on two ranks; reported by rank 0"
        )
        self._replays_differed = counter(
            "replays_differed", "Replays whose two gradients differed; reported by rank 0"
        )
        self._duration = histogram("step_duration_seconds", "Wall time per step", _STEP_BUCKETS)
        self._recovery = histogram(
            "recovery_seconds", "Time from a failure to the end of the next step", _RECOVERY_BUCKETS
        )
        self._score = gauge(
            "straggler_score",
            "Shortest compute time of all ranks divided by this rank's, in (0, 1]",
        )
        self._slow = Gauge(
            "hvdtrain_straggler",
            "1 while this rank is reported as slow, by the phase in which it loses most time",
            ["phase"],
            registry=registry,
        )
        self.straggler(1.0, None)
        self._gauges = {
            "samples_per_second": gauge(
                "samples_per_second", "Global batch size divided by the step time"
            ),
            "loss": gauge("loss", "Training loss of the global batch"),
            "grad_norm": gauge("grad_norm", "Gradient norm before clipping"),
            "lr": gauge("learning_rate", "Learning rate"),
            "time": gauge(
                "last_step_timestamp_seconds",
                "End of the last step; before the first step, the start of the process",
            ),
            "epoch": gauge("epoch", "Passes over the training data so far"),
            "step": gauge("last_step", "Steps of the run so far, including steps before a restart"),
        }
        self._gauges["time"].set_to_current_time()
        self._mfu = gauge(
            "mfu", "Model FLOP/s divided by the peak FLOP/s of all devices; NaN if unknown"
        )
        self._mfu.set(math.nan)
        self._last_sync = gauge(
            "last_sync_step", "Last step after which all ranks had the same state"
        )
        self._on_scrape = _OnScrape()
        registry.register(self._on_scrape)
        process = psutil.Process()
        self.watch("host_memory_bytes", "Resident memory", lambda: process.memory_info().rss)
        self._last_step = 0.0
        self._server = MetricsServer(config, config.port + local_rank, registry)
        self.port: int = self._server.port

    def describe(self, facts: dict[str, str]) -> None:
        """Set the labels of hvdtrain_run_info."""
        self._info.info(facts)

    def step(self, record: Mapping[str, float], batch: int, nonfinite: bool) -> bool:
        """Update the metrics of a step; ignore a repeated step and return False."""
        if record["step"] <= self._last_step:
            return False
        self._last_step = record["step"]
        self._world_size.set(record["world_size"])
        self._steps.inc()
        self._samples.inc(batch)
        self._nonfinite.inc(nonfinite)
        self._duration.observe(record["step_seconds"])
        for key, gauge in self._gauges.items():
            gauge.set(record[key])
        self._mfu.set(record.get("mfu", math.nan))
        return True

    def assigned(self, micro_batches: int) -> None:
        self._assigned.set(micro_batches)

    def go_back(self, step: int) -> None:
        """Count steps after this one again, because the run repeats them."""
        self._last_step = min(self._last_step, step)

    def states_agree(self, step: int) -> None:
        """Record that all ranks have the same state after this step."""
        self._last_sync.set(step)

    def replicas_healed(self, count: int) -> None:
        self._healed.inc(count)

    def replayed(self, agreed: int, differed: int) -> None:
        """Count replayed micro-batches."""
        self._replays.inc(agreed + differed)
        self._replays_differed.inc(differed)

    def recovered(self, seconds: float) -> None:
        """Record the time from a failure to the end of the next step."""
        self._recovery.observe(seconds)

    def straggler(self, score: float, kind: str | None) -> None:
        """Set this rank's score, and the phase in which it is slow; None if it is not slow."""
        self._score.set(score)
        for known in KINDS:
            self._slow.labels(known).set(known == kind)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Serve the gauge hvdtrain_NAME, whose value is read at each scrape."""
        full = f"hvdtrain_{name}"
        self._on_scrape.add(name, lambda: GaugeMetricFamily(full, text, value=value()))

    def watch_total(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Same as `watch` for a value that only increases: hvdtrain_NAME_total."""
        full = f"hvdtrain_{name}"
        self._on_scrape.add(name, lambda: CounterMetricFamily(full, text, value=value()))

    def watch_totals(
        self, name: str, text: str, label: str, values: Callable[[], Mapping[str, float]]
    ) -> None:
        """Same as `watch_total` for several values, which differ in a label."""
        family = partial(CounterMetricFamily, f"hvdtrain_{name}", text, labels=[label])
        self._on_scrape.add(name, lambda: _filled(family(), values()))

    def watch_each(
        self, name: str, text: str, label: str, values: Callable[[], Mapping[str, float]]
    ) -> None:
        """Same as `watch` for several values, which differ in a label."""
        family = partial(GaugeMetricFamily, f"hvdtrain_{name}", text, labels=[label])
        self._on_scrape.add(name, lambda: _filled(family(), values()))

    def linger(self, seconds: float, until: Callable[[], bool]) -> None:
        """Wait for one more scrape of the final metrics; return at once if there were no scrapes.

        Args:
            seconds: maximum wait.
            until: ends the wait early.
        """
        seen, deadline = self._server.scrapes, time.monotonic() + seconds
        if seen and seconds:
            logger.info("waiting at most %g s for one more scrape", seconds)
        while 0 < seen == self._server.scrapes and time.monotonic() < deadline and not until():
            time.sleep(0.05)

    def close(self) -> None:
        self._server.close()


class ExporterAddress(NamedTuple):
    """Address of a rank's exporter; port 0 if it has none."""

    host: str
    local_rank: int
    port: int


def write_targets(
    path: Path, run_id: str, targets: Sequence[ExporterAddress], tls: bool, grid: Grid | None = None
) -> None:
    """Write RUN/targets.json for Prometheus' file_sd_configs.

    Args:
        targets: targets of each rank.
        tls: whether they use HTTPS.
        grid: the ranks' coordinates, if a model may span ranks.

    Raises:
        OSError: it cannot be written.
    """
    job = next((os.environ[name] for name in _JOB_VARIABLES if name in os.environ), "")
    entries = [
        {
            "targets": [f"{target.host}:{target.port}"],
            "labels": {
                "run": run_id,
                "rank": str(rank),
                "local_rank": str(target.local_rank),
                "host": target.host,
                **_axis_labels(grid, rank),
                **({"job_id": job} if job else {}),
                **({"__scheme__": "https"} if tls else {}),
            },
        }
        for rank, target in enumerate(targets)
    ]
    write_atomic(path, (json.dumps(entries, indent=1) + "\n").encode())


def _axis_labels(grid: Grid | None, rank: int) -> dict[str, str]:
    if grid is None or grid.replica_size == 1:
        return {}
    return {LABELS[axis]: str(at) for axis, at in grid.coordinates(rank).items()}


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
    for key, value in values.items():
        family.add_metric([key], value)
    return family
