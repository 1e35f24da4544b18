"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675, algorithm 2.

    Args:
        betas: of the update's interpolation, and of the stored momentum.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(momentum.lerp(p.grad, 1 - beta1).sign_(), alpha=-lr)
                momentum.lerp_(p.grad, 1 - beta2)
