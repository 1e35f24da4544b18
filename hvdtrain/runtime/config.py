"""Configuration of a rank's process."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.config_tiers import expert
from hvdtrain.errors import require


@dataclass
class RuntimeConfig:
    """A rank's process.

    Args:
        threads: CPU threads per rank; 0 = OMP_NUM_THREADS if set, otherwise the host's cores
            divided by its ranks
        standalone: ignore the launcher: each process is an independent run with its own run.id
    """

    threads: int = 0
    standalone: bool = expert(False)

    def __post_init__(self) -> None:
        require(
            self.threads >= 0,
            f"runtime.threads must be >= 0 (0 = by cores and ranks), not {self.threads}",
        )
