"""Configuration of the exchange of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class ExchangeConfig:
    """How the gradients of the ranks become one.

    Args:
        name: `dense` (hvd.DistributedOptimizer sums in floating point) or `exact` (fixed-point
            sums: bitwise the same model on any number of ranks; takes `runtime.threads`)
    """

    name: Literal["dense", "exact"] = "dense"

    @property
    def exact(self) -> bool:
        return self.name == "exact"
