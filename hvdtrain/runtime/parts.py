"""What this rank holds of a model: whole tensors, or parts of them (torch's DTensor)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: a plain one in the same memory, of no autograd graph.

    Told from its method: importing DTensor takes longer than most runs want to wait.
    """
    if hasattr(tensor, "to_local"):
        with torch.no_grad():  # else it would be an operation on a DTensor, which is slow
            tensor = tensor.to_local()
    return tensor.detach()


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name (not copies); a tied parameter has one name."""
    saved = model.state_dict()
    tensors = {name: p.data for name, p in model.named_parameters()}
    tensors.update({name: b for name, b in model.named_buffers() if name in saved})
    return tensors
