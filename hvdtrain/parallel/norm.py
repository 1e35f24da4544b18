"""Norm of a gradient of which each rank holds shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain.runtime.parts import local


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
            identical; such as `spanned.holders` with the replica's mesh.
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
        squares = (norms.to(device).double().square() / counts.to(device)).sum()
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
