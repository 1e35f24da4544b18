"""What this rank holds of a model: whole tensors, or parts of them (torch's DTensor)."""

from __future__ import annotations

from torch import Tensor, nn


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: a plain one in the same memory, of no autograd graph.

    Told from its method: importing DTensor takes longer than most runs want to wait.
    """
    tensor = tensor.detach()
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name (not copies); a tied parameter has one name."""
    saved = model.state_dict()
    tensors = {name: p.data for name, p in model.named_parameters()}
    tensors.update({name: b for name, b in model.named_buffers() if name in saved})
    return tensors
