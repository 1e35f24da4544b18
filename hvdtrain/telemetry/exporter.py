"""The Prometheus exporter of one rank, and the file that tells Prometheus where all ranks are."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
    start_http_server,
)

from hvdtrain.errors import UserError
from hvdtrain.files import write_atomic
from hvdtrain.telemetry.config import TelemetryConfig

# Steps of 10 ms (toys) to minutes (large models on few ranks).
_STEP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180)


class Exporter:
    """Serves this rank's figures over HTTP until it is closed.

    Args:
        config: address and first port.
        local_rank: the port is `config.port` + this; a free one if that is in use.
    Raises:
        UserError: the address cannot be listened on.
    """

    def __init__(self, config: TelemetryConfig, local_rank: int) -> None:
        disable_created_metrics()
        self._registry = registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"hvdtrain_{name}", text, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"hvdtrain_{name}", text, registry=registry)

        self._info = Info("hvdtrain_run", "What runs", registry=registry)
        self._world_size = gauge("world_size", "Ranks of the run")
        self._steps = counter("steps", "Optimizer steps that this process has done")
        self._samples = counter("samples", "Samples of these steps, over all ranks")
        self._nonfinite = counter("nonfinite", "Steps skipped: gradient not finite")
        self._healed = counter("replicas_healed", "Ranks healed whose state differed; of rank 0")
        self._duration = Histogram(
            "hvdtrain_step_duration_seconds",
            "Wall time of a step",
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self._gauges = {
            "samples_per_second": gauge("samples_per_second", "Global batch / wall time of a step"),
            "loss": gauge("loss", "Training loss of the global batch"),
            "grad_norm": gauge("grad_norm", "Norm of the gradient before clipping"),
            "lr": gauge("learning_rate", "Learning rate"),
            "time": gauge("last_step_timestamp_seconds", "When the last step ended"),
        }
        port = config.port + local_rank
        try:
            self._server, self._thread = start_http_server(port, config.host, registry)
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno != errno.EADDRINUSE:
                raise UserError(
                    f"telemetry: {config.host}:{port} cannot be listened on ({error.strerror}); "
                    "choose another telemetry.host or telemetry.port, or telemetry.port 0 for none"
                ) from None
            self._server, self._thread = start_http_server(0, config.host, registry)
        self._last_step = 0.0
        self.port: int = self._server.server_port

    def describe(self, facts: dict[str, str]) -> None:
        """Sets the labels of hvdtrain_run_info."""
        self._info.info(facts)

    def step(self, record: dict[str, float], batch: int, skipped: bool) -> None:
        """Takes over the figures of a step; a second time they change nothing."""
        if record["step"] <= self._last_step:
            return
        self._last_step = record["step"]
        self._world_size.set(record["world_size"])
        self._steps.inc()
        self._samples.inc(batch)
        self._nonfinite.inc(skipped)
        self._duration.observe(record["step_seconds"])
        for key, gauge in self._gauges.items():
            gauge.set(record[key])

    def replicas_healed(self, count: int) -> None:
        self._healed.inc(count)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Serves hvdtrain_NAME, whose value is asked for when Prometheus does."""
        Gauge(f"hvdtrain_{name}", text, registry=self._registry).set_function(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def write_targets(path: Path, run_id: str, targets: Sequence[tuple[str, int, int]]) -> None:
    """Writes RUN/targets.json for Prometheus' file_sd_configs.

    Args:
        targets: of each rank: (host, local rank, port).

    Raises:
        OSError: it cannot be written.
    """
    entries = [
        {
            "targets": [f"{host}:{port}"],
            "labels": {
                "run": run_id,
                "rank": str(rank),
                "local_rank": str(local_rank),
                "host": host,
            },
        }
        for rank, (host, local_rank, port) in enumerate(targets)
    ]
    write_atomic(path, (json.dumps(entries, indent=1) + "\n").encode())
