"""16-bit parameters whose optimizer updates float32 copies of them (master weights)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_SHORT = (torch.float16, torch.bfloat16)


class MasterWeights(Optimizer):
    """Optimizer over a model's parameters that lets an inner optimizer update float32 copies.

    Most updates are smaller than the resolution of bfloat16, so 16-bit parameters alone would not
    change. (Master weights: Micikevicius et al., "Mixed precision training", arXiv:1710.03740.)
    Each step copies the gradients to the masters, steps, and rounds the masters to the parameters.
    Masters are created from the parameters in the first step that updates them.

    `state[parameter]` is the inner optimizer's state and "master": so it is saved, broadcast and
    compared like any optimizer's state.

    Args:
        inner: over the model's parameters; receives masters instead of the 16-bit parameters.
    """

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([{**group} for group in inner.param_groups], defaults={})
        self._inner = inner
        inner.state.clear()
        for group in inner.param_groups:
            group["params"] = [
                nn.Parameter(torch.empty_like(p, dtype=torch.float32)) if p.dtype in _SHORT else p
                for p in group["params"]
            ]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step; parameters without a gradient are skipped."""
        moved = []
        for own, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in own.items() if key != "params"})
            for parameter, master in zip(own["params"], inner["params"], strict=True):
                if parameter.grad is None:
                    master.grad = None
                else:
                    self._lend(parameter, master)
                    moved.append((parameter, master))
        self._inner.step()
        for parameter, master in moved:
            self.state[parameter] = {**self._inner.state[master]}
            if master is not parameter:
                parameter.copy_(master)
                self.state[parameter]["master"] = master.data

    def _lend(self, parameter: Tensor, master: Tensor) -> None:
        """Pass `state` to the inner optimizer; it may have been replaced since the last step."""
        state: dict[str, Any] = {**self.state.get(parameter, {})}
        if master is not parameter and parameter.grad is not None:
            master.data = state.pop("master") if state else parameter.detach().float()
            master.grad = parameter.grad.float()
        self._inner.state[master] = state
