"""A model's saved buffers as they were before a step, for a step that leaves nothing behind."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SavedBuffers:
    """Statistics such as BatchNorm's change in the forward pass, before a step can fail.

    Covers the buffers that `state_dict` has, also where a module puts a new tensor in a buffer's
    place. Not covered: buffers registered with persistent=False and tensors that are plain
    attributes. They are not saved either, so they are no part of a run's state.

    Attributes:
        places: module and name of each.
        values: as the last `keep` saw them, in the order of `places`.
    """

    def __init__(self, model: nn.Module) -> None:
        saved = model.state_dict()
        self.places = [
            (module, name)
            for prefix, module in model.named_modules()
            for name in module._buffers
            if (f"{prefix}.{name}" if prefix else name) in saved
        ]
        self.values: list[Tensor] = []
        self._tensors: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copies the values of now."""
        tensors = [getattr(module, name) for module, name in self.places]
        if [t.shape for t in tensors] != [v.shape for v in self.values]:
            self.values = [tensor.detach().clone() for tensor in tensors]
        elif tensors:
            torch._foreach_copy_(self.values, tensors)
        self._tensors = tensors

    @torch.no_grad()
    def swap(self) -> None:
        """Brings back what the last `keep` saw, and keeps the current values in its place."""
        now = [getattr(module, name).detach().clone() for module, name in self.places]
        self.restore()
        self.values = now

    @torch.no_grad()
    def restore(self) -> None:
        """Brings back what the last `keep` saw."""
        for (module, name), tensor, value in zip(
            self.places, self._tensors, self.values, strict=True
        ):
            tensor.copy_(value)
            setattr(module, name, tensor)
