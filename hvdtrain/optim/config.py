"""Configuration of the optimizer, the learning-rate schedule and the precision."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.config_tiers import basic, expert
from hvdtrain.errors import require


@dataclass
class OptimConfig:
    """The optimizer.

    Args:
        name: `adamw`, `sgd` (with momentum), `adam`, `lion` (arXiv:2302.06675), `adafactor`
            (arXiv:1804.04235), `adamw8bit` (arXiv:2110.02861), or `muon`, which updates the
            matrices inside the model and uses adamw for embeddings, output layer and vectors
        lr: learning rate at the end of the warm-up
        scale_lr: factor applied to `optim.lr` if `batch.per_rank_size` is set: the number of ranks
            (`linear`, arXiv:1706.02677) or its square root (`sqrt`)
        betas: decay rates of the two moments of adamw and adam; the two rates of lion
        eps: added to the square root of the second moment of adamw and adam
        fused: adamw and adam in torch's single fused kernel: faster, but results are rounded
            differently
        momentum: momentum of sgd and muon
        weight_decay: weight decay of parameters with 2 or more dimensions; sgd and adam add it to
            the gradient, the other optimizers decouple it from the gradient
        clip_norm: maximum global norm of the gradients, to which larger ones are scaled down; 0 =
            no clipping
        ema_decay: decay rate of an exponential moving average of the weights, such as 0.999; the
            average is evaluated in addition to the weights; 0 = none
        freeze: names of parameters that are not trained, with * and ?, such as `embedding.*`
    """

    name: Literal["adamw", "sgd", "adam", "lion", "muon", "adafactor", "adamw8bit"] = "adamw"
    lr: float = basic(1e-3)
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = expert(1e-8)
    fused: bool = expert(False)
    momentum: float = 0.9
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    ema_decay: float = 0.0
    freeze: list[str] | str = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.freeze, str):
            self.freeze = [self.freeze]
        require(
            0 <= self.ema_decay < 1,
            f"optim.ema_decay must lie in [0, 1) (0 = none), not {self.ema_decay}",
        )
        require(self.eps > 0 and math.isfinite(self.eps), f"optim.eps must be > 0, not {self.eps}")
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
    warmup_steps: int = basic(20)
    final_ratio: float = 0.1

    def __post_init__(self) -> None:
        require(
            self.warmup_steps >= 0, f"schedule.warmup_steps must be >= 0, not {self.warmup_steps}"
        )
        require(
            0 <= self.final_ratio <= 1,
            f"schedule.final_ratio must lie in [0, 1], not {self.final_ratio}",
        )


@dataclass
class PrecisionConfig:
    """Numeric precision of the model's computation.

    Args:
        name: `float32` computes in the dtype of the parameters; `bf16` and `fp16` do matrix
            products in 16 bits (autocast), `fp16` with a dynamic loss scale; `bf16-params` keeps
            parameters in bfloat16, master weights and optimizer state in float32; `auto` is bf16 if
            the GPU supports it, fp16 on older GPUs and float32 on CPUs
        tf32: float32 matrix products and convolutions on CUDA round their factors to TF32
        cudnn_benchmark: cuDNN benchmarks its algorithms for each new shape and uses the fastest
    """

    name: Literal["float32", "bf16", "fp16", "bf16-params", "auto"] = basic("float32")
    tf32: bool = False
    cudnn_benchmark: bool = expert(False)
