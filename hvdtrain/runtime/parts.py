"""Tensors of a model on this rank: whole tensors, or shards of them (torch's DTensor)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor: a plain tensor in the same memory, without autograd.

    A DTensor is recognized by its method, because importing DTensor is slow.
    """
    if hasattr(tensor, "to_local"):
        with torch.no_grad():  # otherwise it would be a DTensor operation, which is slow
            tensor = tensor.to_local()
    return tensor.detach()


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers by name (not copies); a tied parameter has one name."""
    saved = model.state_dict()
    tensors = {name: p.data for name, p in model.named_parameters()}
    tensors.update({name: b for name, b in model.named_buffers() if name in saved})
    return tensors
