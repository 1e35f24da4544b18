"""Tensors of which each rank holds a part (torch's DTensor), beside those that it holds whole."""

from __future__ import annotations

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; it shares the memory.

    Told from its method: importing DTensor takes longer than most runs want to wait.
    """
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
