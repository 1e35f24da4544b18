"""Parameters of 16 bits whose optimizer steps on copies of them in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_SHORT = (torch.float16, torch.bfloat16)


class MasterWeights(Optimizer):
    """An optimizer over a model's parameters that lets another one step on float32 copies.

    An update is mostly smaller than what bfloat16 can tell apart, so parameters of 16 bits alone
    would not move. (Master weights: Micikevicius et al., "Mixed precision training",
    arXiv:1710.03740.) Each step gives the masters the gradients, steps, and rounds the masters to
    the parameters. Masters are made from the parameters in the first step that moves them.

    `state[parameter]` is what the inner optimizer keeps, and "master": so it is saved, broadcast
    and compared as any optimizer's state is.

    Args:
        inner: over the model's parameters; gets the masters in the place of those of 16 bits.
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
        """Steps; a parameter without a gradient is passed over."""
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
        """Gives the inner optimizer what `state` has; it may have been replaced meanwhile."""
        state: dict[str, Any] = {**self.state.get(parameter, {})}
        if master is not parameter and parameter.grad is not None:
            master.data = state.pop("master") if state else parameter.detach().float()
            master.grad = parameter.grad.float()
        self._inner.state[master] = state
