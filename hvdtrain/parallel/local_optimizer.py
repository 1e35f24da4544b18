"""An optimizer over split parameters that steps on what this rank holds of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from hvdtrain.runtime.parts import local


class LocalOptimizer(Optimizer):
    """An optimizer over a model's parameters that lets another one step on this rank's parts.

    Each operation on a DTensor asks how its result is split, which takes longer than the operation
    itself where tensors are small; and an optimizer has a dozen of them a parameter. One that is
    elementwise does to a part what it does to the whole tensor, with the same bits.

    `state[parameter]` is what the inner optimizer keeps: plain tensors of the shape of the part,
    and counts.

    Args:
        inner: over the model's parameters, which may be DTensors; elementwise. It gets the parts in
            their place: plain tensors in the same memory.
    """

    def __init__(self, inner: Optimizer) -> None:
        for group in inner.param_groups:
            if "foreach" in group and not group.get("fused"):
                group["foreach"] = True  # the same bits; on CPUs it is not torch's own choice
        super().__init__([{**group} for group in inner.param_groups], defaults={})
        self._inner = inner
        for group in inner.param_groups:
            group["params"] = [nn.Parameter(local(p)) for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Steps; a parameter without a gradient is passed over."""
        self._inner.state.clear()
        for own, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in own.items() if key != "params"})
            for parameter, part in zip(own["params"], inner["params"], strict=True):
                if parameter.grad is not None:
                    part.data = local(parameter)  # FSDP may have moved it
                    part.grad = local(parameter.grad)
                    self._inner.state[part] = self.state[parameter]  # one dictionary
        self._inner.step()
        for group in self._inner.param_groups:
            for part in group["params"]:
                part.grad = None
