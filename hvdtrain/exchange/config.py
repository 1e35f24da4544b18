"""Configuration of the exchange of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hvdtrain.errors import require


@dataclass
class ExchangeConfig:
    """How the gradients of the ranks become one.

    Args:
        name: `dense` (hvd.DistributedOptimizer sums in floating point) or `exact` (fixed-point
            sums: bitwise the same model on any number of ranks; takes `runtime.threads`)
        wire: as what gradients of `dense` travel: `float32`, or `float16` with a scale that follows
            from overflows
    """

    name: Literal["dense", "exact"] = "dense"
    wire: Literal["float32", "float16"] = "float32"

    def __post_init__(self) -> None:
        require(
            not self.exact or self.wire == "float32",
            f"exchange.wire {self.wire} excludes exchange.name exact, which sends integers",
        )

    @property
    def exact(self) -> bool:
        return self.name == "exact"
