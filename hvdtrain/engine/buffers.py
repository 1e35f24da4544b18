"""A model's saved buffers as they were before a step, for a step that leaves nothing behind."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SavedBuffers:
    """Statistics such as BatchNorm's change in the forward pass, before a step can fail.

    Covers the buffers that `state_dict` has, also where a module puts a new tensor in a buffer's
    place. Not covered: buffers registered with persistent=False and tensors that are plain
    attributes. They are not saved either, so they are no part of a run's state.
    """

    def __init__(self, model: nn.Module) -> None:
        saved = model.state_dict()
        self._places = [
            (module, name)
            for prefix, module in model.named_modules()
            for name in module._buffers
            if (f"{prefix}.{name}" if prefix else name) in saved
        ]
        self._tensors: list[Tensor] = []
        self._values: list[Tensor] = []

    def keep(self) -> None:
        """Copies the values of now."""
        tensors = [getattr(module, name) for module, name in self._places]
        if [t.shape for t in tensors] == [v.shape for v in self._values]:
            for value, tensor in zip(self._values, tensors, strict=True):
                value.copy_(tensor)
        else:
            self._values = [tensor.detach().clone() for tensor in tensors]
        self._tensors = tensors

    @torch.no_grad()
    def restore(self) -> None:
        """Brings back what the last `keep` saw."""
        for (module, name), tensor, value in zip(
            self._places, self._tensors, self._values, strict=True
        ):
            tensor.copy_(value)
            setattr(module, name, tensor)
