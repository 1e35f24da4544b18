"""Tensors of which each rank holds a part (torch's DTensor), beside those that it holds whole."""

from __future__ import annotations

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: a plain one in the same memory, of no autograd graph.

    Told from its method: importing DTensor takes longer than most runs want to wait.
    """
    tensor = tensor.detach()
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
