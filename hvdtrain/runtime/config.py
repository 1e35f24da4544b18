"""Configuration of a rank's process."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import require


@dataclass
class RuntimeConfig:
    """A rank's process.

    Args:
        threads: of a rank's computations on the CPU; 0 = OMP_NUM_THREADS, or else the cores of
            the host divided by its ranks
    """

    threads: int = 0

    def __post_init__(self) -> None:
        require(
            self.threads >= 0,
            f"runtime.threads must be >= 0 (0 = by cores and ranks), not {self.threads}",
        )
