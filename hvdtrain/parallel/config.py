"""Configuration of the axes along which one model spans ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.config_tiers import expert
from hvdtrain.errors import require
from hvdtrain.runtime.mesh import key_of_degree

# Axes of one replica, in the order in which their ranks are placed within a host: neighbors on the
# first axis communicate most.
AXES = ("tensor", "context", "shard", "pipeline")


@dataclass
class ShardConfig:
    """Shards of parameters, gradients and optimizer state (ZeRO, arXiv:1910.02054).

    Args:
        degree: ranks that hold a shard of each parameter, its gradient and its optimizer state, and
            train on their own micro-batches (stages 2 and 3)
        stage: 3: a block's parameters are gathered for its forward pass and again for its backward
            pass; 2: they stay whole in between; 1: parameters are whole on each rank, each rank
            updates a shard of them, and holds only that shard of the optimizer state; over all
            ranks, without `parallel.shard.degree`
        copies: ranks that hold each shard of stage 1, on different hosts if there are several: with
            2, no failure of one rank or host loses a shard
        offload: `cpu`: with `parallel.shard.degree`, on GPUs, parameters, gradients and optimizer
            state are kept in host memory, and the optimizer steps there
    """

    degree: int = 1
    stage: Literal[1, 2, 3] = 3
    copies: int = expert(2)
    offload: Literal["none", "cpu"] = expert("none")

    def __post_init__(self) -> None:
        for name in ("degree", "copies"):
            value = getattr(self, name)
            require(value >= 1, f"parallel.shard.{name} must be >= 1, not {value}")

    @property
    def of_optimizer(self) -> bool:
        """Whether only the optimizer state is in shards."""
        return self.stage == 1


@dataclass
class ParallelConfig:
    """Axes along which one model spans ranks; the remaining factor of the ranks is the data axis.

    Args:
        tensor: ranks that split each matrix of a block between them
        pipeline: stages that the blocks are divided into, each on separate ranks
        context: ranks that split a sequence between them
        shard: shards of parameters, gradients and optimizer state
        schedule: order of a stage's forward and backward passes: `gpipe`, `1f1b` (less memory), or
            with two stages per rank `interleaved1f1b` or `zero-bubble` (less waiting)
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    shard: ShardConfig = field(default_factory=ShardConfig)
    schedule: Literal["gpipe", "1f1b", "interleaved1f1b", "zero-bubble"] = "1f1b"

    def __post_init__(self) -> None:
        for axis, value in self.degrees.items():
            require(value >= 1, f"parallel.{axis} must be >= 1, not {value}")

    @property
    def degrees(self) -> dict[str, int]:
        """Number of ranks along each axis of a replica."""
        return {
            axis: self.shard.degree if axis == "shard" else getattr(self, axis) for axis in AXES
        }

    @property
    def first_degree(self) -> str:
        """The first degree above 1, as on the command line; "": all are 1."""
        spans = (f"{key_of_degree(axis)} {n}" for axis, n in self.degrees.items() if n > 1)
        return next(spans, "")

    @property
    def spans_ranks(self) -> bool:
        """Whether a replica of the model needs more than one rank."""
        return bool(self.first_degree)

    @property
    def any(self) -> bool:
        """Whether the ranks hold shards of the model or of the optimizer state."""
        return self.spans_ranks or self.shard.of_optimizer
