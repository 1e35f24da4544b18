"""Configuration of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import require


@dataclass
class CheckpointConfig:
    """Checkpoints.

    Args:
        every: steps between checkpoints; the last step is always saved; 0 = never
        keep: the newest that are kept
    """

    every: int = 100
    keep: int = 3

    def __post_init__(self) -> None:
        require(self.every >= 0, f"checkpoint.every must be >= 0 (0 = never), not {self.every}")
        require(self.keep >= 1, f"checkpoint.keep must be >= 1, not {self.keep}")
