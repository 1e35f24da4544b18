"""Configuration of the response to ranks that die, hang or rejoin."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.config_tiers import expert
from hvdtrain.errors import require


@dataclass
class ElasticConfig:
    """Failures.

    Args:
        timeout_seconds: elastic runs: a collective fails if a rank does not respond for this
            long (whole seconds); 0 = 3 s, and more for many ranks
        hang_seconds: a rank that makes no progress for this long, while it neither uses CPU or
            disk nor waits for others, is killed, and its stacks are written to the run's
            logs; 10 times as long if it is busy, or has not taken part yet; 0 = never
        driver_timeout: `hvdtrain launch` without hosts: seconds without a driver before an agent
            ends its ranks; it exits with 75 unless a driver is alive on another host
    """

    timeout_seconds: int = expert(0)
    hang_seconds: float = expert(60.0)
    driver_timeout: float = expert(60.0)

    def __post_init__(self) -> None:
        require(
            self.timeout_seconds >= 0,
            f"elastic.timeout_seconds must be >= 0 (0 = by the number of ranks), not "
            f"{self.timeout_seconds}",
        )
        require(
            self.hang_seconds >= 0,
            f"elastic.hang_seconds must be >= 0 (0 = never), not {self.hang_seconds}",
        )
        require(
            self.driver_timeout >= 1,
            f"elastic.driver_timeout must be >= 1 s, not {self.driver_timeout}",
        )
