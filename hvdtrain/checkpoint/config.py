"""Configuration of checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from hvdtrain.config_tiers import basic, expert
from hvdtrain.errors import require


@dataclass
class MemoryCopiesConfig:
    """Copies of each rank's shards in host memory, in elastic runs of models that span ranks.

    Args:
        every: steps between copies, and the most steps that are repeated after the loss of all
            ranks that hold a shard; 0 = no copies
        copies: hosts that hold a copy of a rank's shard, in addition to the rank's own host; as
            many hosts may be lost at once
    """

    every: int = 0
    copies: int = expert(1)

    def __post_init__(self) -> None:
        require(
            self.every >= 0, f"checkpoint.memory.every must be >= 0 (0 = never), not {self.every}"
        )
        require(self.copies >= 1, f"checkpoint.memory.copies must be >= 1, not {self.copies}")


@dataclass
class CheckpointConfig:
    """Checkpoints.

    Args:
        every: steps between checkpoints; the last step is always saved; 0 = not by steps
        every_seconds: seconds between checkpoints, in addition to `checkpoint.every`; 0 = not by
            time; if both are 0, no checkpoints are written unless `checkpoint.keep_best` is set
        keep: how many of the newest checkpoints are kept
        keep_best: save whenever an evaluation gives the lowest validation loss so far, and keep
            that checkpoint in addition to the newest
        memory: copies in the memory of other hosts
        mirror: address to which each finished checkpoint is uploaded, such as s3://bucket/run, and
            from which a run without checkpoints resumes; requires `run.id`; null = none
        mirror_wait_seconds: longest wait for uploads at the end of the run
    """

    every: int = basic(100)
    every_seconds: float = 0.0
    keep: int = 3
    keep_best: bool = False
    memory: MemoryCopiesConfig = field(default_factory=MemoryCopiesConfig)
    mirror: str | None = None
    mirror_wait_seconds: float = expert(600.0)

    def __post_init__(self) -> None:
        require(self.every >= 0, f"checkpoint.every must be >= 0 (0 = never), not {self.every}")
        require(
            self.every_seconds >= 0,
            f"checkpoint.every_seconds must be >= 0 (0 = off), not {self.every_seconds}",
        )
        require(self.keep >= 1, f"checkpoint.keep must be >= 1, not {self.keep}")
        require(
            0 <= self.mirror_wait_seconds < math.inf,
            f"checkpoint.mirror_wait_seconds must be >= 0, not {self.mirror_wait_seconds}",
        )
        if self.mirror is not None:
            _check_address(self.mirror)

    @property
    def enabled(self) -> bool:
        """Whether checkpoints are written; if so, the last step is always saved."""
        return self.every > 0 or self.every_seconds > 0 or self.keep_best


def _check_address(mirror: str) -> None:
    """Raise ValueError, without the address if it may contain a secret."""
    address = urlsplit(mirror)
    require(
        "@" not in mirror and not address.query and not address.fragment,
        "checkpoint.mirror must not contain user names, passwords or parameters: they would be "
        "written to config.yaml; set credentials in the environment, such as AWS_ACCESS_KEY_ID",
    )
    require(
        bool(address.scheme and (address.netloc or address.path.strip("/"))) and "::" not in mirror,
        f"checkpoint.mirror is an address such as s3://bucket/run or file:///path, not {mirror!r}",
    )
