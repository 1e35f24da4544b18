"""Configuration of the gradient exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.config_tiers import expert
from hvdtrain.errors import require


@dataclass
class ExchangeConfig:
    """How the gradients of the ranks are combined (gradient synchronization).

    Args:
        name: `dense` (Horovod sums in floating point) or `exact` (fixed-point sums: bitwise
            identical models on any number of ranks; requires `runtime.threads`)
        hierarchical: ranks sum within their host first, then each sums its slice across hosts;
            requires the same number of ranks on each host. `auto`: over Gloo, except in elastic
            runs
        wire: wire format of the gradients of `dense`: `float32`, `float16` with a scale that adapts
            to overflows, or `bfloat16`
        reduce: `average`, or `adasum` (orthogonal gradients are added, not averaged; requires MPI);
            with it the result depends on the number of ranks
        compression: `none`, `topk` (only the largest elements are sent) or `powersgd` (matrices are
            sent as products of two thin matrices); what is omitted is added to the next gradient.
            The result of the last two depends on the number of ranks
        ratio: fraction of the elements that `topk` sends
        rank: rank of the approximations of `powersgd`
        start_step: steps before `powersgd` begins; until then gradients are sent uncompressed
        sync_every: steps that each rank takes on its own before parameters and optimizer state are
            averaged; 0 = gradients are exchanged in each step
        outer: with `sync_every`: parameters become their average (`none`), or the result of SGD
            with Nesterov momentum on their change (`nesterov`: DiLoCo)
        outer_lr: learning rate of `outer`
        outer_momentum: momentum of `outer`
    """

    name: Literal["dense", "exact"] = "dense"
    hierarchical: Literal["auto"] | bool = expert("auto")
    wire: Literal["float32", "float16", "bfloat16"] = "float32"
    reduce: Literal["average", "adasum"] = "average"
    compression: Literal["none", "topk", "powersgd"] = "none"
    ratio: float = 0.01
    rank: int = 4
    start_step: int = expert(10)
    sync_every: int = 0
    outer: Literal["none", "nesterov"] = "none"
    outer_lr: float = expert(0.7)
    outer_momentum: float = expert(0.9)

    def __post_init__(self) -> None:
        require(0 < self.ratio <= 1, f"exchange.ratio must be in (0, 1], not {self.ratio}")
        require(self.rank >= 1, f"exchange.rank must be >= 1, not {self.rank}")
        require(self.start_step >= 0, f"exchange.start_step must be >= 0, not {self.start_step}")
        require(
            self.sync_every >= 0,
            f"exchange.sync_every must be >= 0 (0 = gradients in each step), not {self.sync_every}",
        )
        require(self.outer_lr > 0, f"exchange.outer_lr must be > 0, not {self.outer_lr}")
        require(
            0 < self.outer_momentum < 1,
            f"exchange.outer_momentum must be in (0, 1), not {self.outer_momentum}",
        )

    @property
    def depends_on_ranks(self) -> str:
        """Key that makes the curve depend on the number of ranks by design; "" if there is none."""
        if self.reduce == "adasum":
            return "exchange.reduce adasum"
        if self.sync_every:
            return f"exchange.sync_every {self.sync_every}"
        return "" if self.compression == "none" else f"exchange.compression {self.compression}"

    @property
    def exact(self) -> bool:
        return self.name == "exact"


# Named strategies of `hvdtrain bench` and `hvdtrain plan` -> keys of `exchange`; keys set by one
# strategy have their defaults in the others.
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "dense": {},
    "float16": {"wire": "float16"},
    "bfloat16": {"wire": "bfloat16"},
    "topk": {"compression": "topk"},
    "powersgd": {"compression": "powersgd"},
    "local_sgd": {"sync_every": 8},
    "diloco": {"sync_every": 8, "outer": "nesterov", "outer_momentum": 0.5},
    "exact": {"name": "exact"},
}
