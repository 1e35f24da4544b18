"""Optimizer over split parameters that updates this rank's shards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from hvdtrain.runtime.parts import local


class LocalOptimizer(Optimizer):
    """Optimizer over a model's parameters that lets an inner optimizer step on this rank's shards.

    Each operation on a DTensor determines how its result is split, which takes longer than the
    operation itself if tensors are small, and an optimizer has a dozen operations per parameter. An
    elementwise optimizer does to a shard what it does to the whole tensor, bitwise identically.

    `state[parameter]` is the inner optimizer's state: plain tensors of the shard's shape, and
    counts.

    Args:
        inner: elementwise; over the model's parameters, which may be DTensors. They are replaced in
            it by the shards: plain tensors in the same memory.
    """

    def __init__(self, inner: Optimizer) -> None:
        for group in inner.param_groups:
            if "foreach" in group and not group.get("fused"):
                group["foreach"] = True  # bitwise identical; not torch's default on CPUs
        super().__init__([{**group} for group in inner.param_groups], defaults={})
        self._inner = inner
        for group in inner.param_groups:
            group["params"] = [nn.Parameter(local(p)) for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step; parameters without a gradient are skipped."""
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
