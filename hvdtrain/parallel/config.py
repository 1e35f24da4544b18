"""Configuration of the axes along which one model spans ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.errors import require

# Axes of one replica; neighbors on the first axis communicate most.
AXES = ("tensor", "context", "shard", "pipeline")


@dataclass
class ParallelConfig:
    """Axes along which one model spans ranks; the remaining factor of the ranks is the data axis.

    Args:
        tensor: ranks that split each matrix of a block between them
        pipeline: stages that the blocks are divided into, each on separate ranks
        context: ranks that split a sequence between them
        shard: ranks that hold a shard of each parameter, its gradient and its optimizer state
            (ZeRO-3, arXiv:1910.02054), and train on their own micro-batches
        reshard_after_forward: with `shard`, whether a block's parameters are gathered again for its
            backward pass; false: they stay whole in between (ZeRO-2)
        offload: `cpu`: with `shard`, on GPUs, parameters, gradients and optimizer state are kept in
            host memory, and the optimizer steps there
        schedule: order of a stage's forward and backward passes: `gpipe`, `1f1b` (less memory), or
            with two stages per rank `interleaved1f1b` or `zero-bubble` (less waiting)
        place: the axes, in the order in which their ranks are placed within a host
        zero: 1: each rank updates a shard of the parameters, and holds only that shard of the
            optimizer state (ZeRO-1, arXiv:1910.02054); 0: each rank updates all parameters
        zero_copies: ranks that hold each shard of `zero`, on different hosts if there are several:
            with 2, no failure of one rank or host loses a shard
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    shard: int = 1
    reshard_after_forward: bool = True
    offload: Literal["none", "cpu"] = "none"
    schedule: Literal["gpipe", "1f1b", "interleaved1f1b", "zero-bubble"] = "1f1b"
    place: list[str] = field(default_factory=lambda: list(AXES))
    zero: int = 0
    zero_copies: int = 2

    def __post_init__(self) -> None:
        for name in (*AXES, "zero_copies"):
            value = getattr(self, name)
            require(value >= 1, f"parallel.{name} must be >= 1, not {value}")
        require(
            sorted(self.place) == sorted(AXES),
            f"parallel.place must name each of {', '.join(AXES)} once, not {self.place}",
        )
        require(self.zero in (0, 1), f"parallel.zero must be 0 or 1, not {self.zero}")

    @property
    def degrees(self) -> dict[str, int]:
        """Number of ranks along each axis of a replica."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def spans_ranks(self) -> bool:
        """Whether a replica of the model needs more than one rank."""
        return any(degree > 1 for degree in self.degrees.values())
