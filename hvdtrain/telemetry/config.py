"""Configuration groups `telemetry` and `profile`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hvdtrain.config_tiers import basic, expert
from hvdtrain.errors import require

# A rank with a lower straggler score is reported as slow.
STRAGGLER_THRESHOLD = 0.75
# Maximum wait of a scraped rank at its exit for a final scrape, in seconds.
LINGER_SECONDS = 30.0


@dataclass
class TelemetryConfig:
    """The Prometheus exporter of each rank, the comparison of ranks, and the targets of metrics.

    Args:
        port: a rank serves its metrics on this port + its local rank; a port in use is replaced
            by a free one; 0 = off
        host: address to listen on
        tls_cert_file: certificate (PEM) for HTTPS; requires `telemetry.tls_key_file`
        tls_key_file: its private key (PEM)
        auth_file: a file with one line `user:password`, required of all scrapers
        exchange_every: steps between two comparisons of all ranks' times; 0 = never
        peak_flops: peak FLOP/s of a rank's device, for the model FLOPs utilization (MFU);
            null = known values of GPUs, by name
        tensorboard: also write metrics to RUN/tensorboard
        wandb_project: also log to a run in this project of Weights & Biases
        mlflow_experiment: also log to a run in this experiment of MLflow
    """

    port: int = basic(9855)
    host: str = "0.0.0.0"
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    auth_file: str | None = None
    exchange_every: int = expert(10)
    peak_flops: float | None = expert(None)
    tensorboard: bool = False
    wandb_project: str | None = None
    mlflow_experiment: str | None = None

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, f"telemetry.port must lie in 0..65535, not {self.port}")
        require(
            self.exchange_every >= 0,
            f"telemetry.exchange_every must be >= 0, not {self.exchange_every}",
        )
        require(
            self.peak_flops is None or self.peak_flops > 0,
            f"telemetry.peak_flops must be > 0, not {self.peak_flops}",
        )


@dataclass
class ProfileConfig:
    """Traces of selected steps.

    Args:
        steps: `10:13` traces steps 10, 11 and 12, as numbered in metrics.jsonl (in YAML with
            quotes); null = none
        ranks: ranks that write a trace, such as `0,3`; null = all
    """

    # YAML reads 10:13 without quotes as the number 613, which needs a specific error message.
    steps: str | int | None = None
    ranks: str | int | list[int] | None = None

    def __post_init__(self) -> None:
        require(
            self.steps is None or len(self.range) > 0,
            "profile.steps must be FIRST:END with 1 <= FIRST < END, such as 10:13 for steps 10, 11 "
            f'and 12 (in YAML "10:13", with quotes), not {self.steps}',
        )
        require(
            self.ranks is None or re.fullmatch(r"\d+(,\d+)*", self._ranks) is not None,
            f"profile.ranks must be ranks such as 0,3, not {self.ranks}; omit it for all ranks",
        )

    @property
    def range(self) -> range:
        """The steps, counted from 1; empty if nothing is profiled."""
        match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", str(self.steps))
        return range(int(match[1]), int(match[2])) if match else range(0)

    @property
    def named_ranks(self) -> frozenset[int] | None:
        """The ranks that write a trace; None: all."""
        return None if self.ranks is None else frozenset(map(int, self._ranks.split(",")))

    @property
    def _ranks(self) -> str:
        return re.sub(r"[\s\[\]]", "", str(self.ranks))
