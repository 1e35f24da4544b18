"""Configuration of the optimizer and of the learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hvdtrain.errors import require


@dataclass
class OptimConfig:
    """The optimizer.

    Args:
        name: the optimizer
        lr: learning rate at the end of the warm-up
        betas: AdamW's decay rates of the two moments
        momentum: momentum of SGD
        weight_decay: of parameters with 2 or more dimensions; decoupled for AdamW
        clip_norm: gradients are scaled down to this global norm; 0 = no clipping
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.9
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        require(self.lr > 0 and math.isfinite(self.lr), f"optim.lr must be > 0, not {self.lr}")
        for beta in self.betas:
            require(0 <= beta < 1, f"optim.betas must lie in [0, 1), not {beta}")
        require(0 <= self.momentum < 1, f"optim.momentum must lie in [0, 1), not {self.momentum}")
        require(self.weight_decay >= 0, f"optim.weight_decay must be >= 0, not {self.weight_decay}")
        require(
            self.clip_norm >= 0, f"optim.clip_norm must be >= 0 (0 = off), not {self.clip_norm}"
        )


@dataclass
class ScheduleConfig:
    """The learning rate as a function of the step.

    Args:
        name: `cosine` and `linear` decay to `schedule.final_ratio` at the last step
        warmup_steps: steps in which the rate rises linearly from 0 to `optim.lr`
        final_ratio: the last step's rate as a fraction of `optim.lr`
    """

    name: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 20
    final_ratio: float = 0.1

    def __post_init__(self) -> None:
        require(
            self.warmup_steps >= 0, f"schedule.warmup_steps must be >= 0, not {self.warmup_steps}"
        )
        require(
            0 <= self.final_ratio <= 1,
            f"schedule.final_ratio must lie in [0, 1], not {self.final_ratio}",
        )
