"""The part of a model that this rank holds, as plain tensors."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, in the same memory: a plain one, of no autograd graph.

    An optimizer that works element by element should be given these: torch works out afresh how
    an operation on DTensors is split whenever one of its numbers differs, and AdamW's differ at
    each step.
    """
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
