"""Optimizer over split parameters that updates this rank's shards, and the norm for clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.runtime.device import sent
from hvdtrain.runtime.tensor_shards import local


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


def total_norm(
    parameters: Iterable[Tensor],
    holders: Callable[[Tensor], int],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """Return the 2-norm of all gradients of a model that is spread over ranks.

    All ranks of `group` must call it, and receive a bitwise identical result.

    Args:
        parameters: this rank's, with gradients: DTensors or plain tensors; there may be none.
        holders: number of ranks of `group` that hold the same shard of a parameter, bitwise
            identical; such as `spanned.copies_in_replica` with the replica's mesh.
        group: the ranks of one replica; None: torch's default group.
        device: this rank computes on it; with CPU offload gradients are on another.

    Returns:
        A scalar, float64, on `device`.
    """
    parameters = [p for p in parameters if p.grad is not None]
    parts = [local(p.grad) for p in parameters if p.grad is not None]
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if parts:
        # A 16-bit norm would have only two or three digits.
        norms = torch.stack([torch.linalg.vector_norm(p, dtype=_wide(p.dtype)) for p in parts])
        counts = torch.tensor([holders(p) for p in parameters], dtype=torch.float64)
        squares = (norms.to(device).double().square() / sent(counts, device)).sum()
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
