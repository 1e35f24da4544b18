"""Configuration of what a rank publishes."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import require


@dataclass
class TelemetryConfig:
    """The Prometheus exporter of each rank.

    Args:
        port: a rank serves on port + local rank; a port in use is replaced by a free one; 0 = off
        host: address to listen on
    """

    port: int = 9855
    host: str = "0.0.0.0"

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, f"telemetry.port must lie in 0..65535, not {self.port}")
