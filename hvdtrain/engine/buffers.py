"""A model's saved buffers in a step.

SavedBuffers keeps their values in case the step fails. BatchStatistics makes BatchNorm's running
statistics identical on any number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # private, see tasks/sync_batchnorm.py

from hvdtrain.engine.control import Totals


class SavedBuffers:
    """Copies of saved buffers, such as BatchNorm's statistics, which change before a step can fail.

    Covers the buffers in `state_dict`, even if a module replaces a buffer by a new tensor. Not
    covered: buffers registered with persistent=False and tensors that are plain attributes. They
    are not saved either, so they are not part of a run's state.

    Attributes:
        places: module and name of each buffer.
        values: values at the last `keep`, in the order of `places`.
    """

    def __init__(self, model: nn.Module) -> None:
        saved = model.state_dict()
        self.places = [
            (module, name)
            for prefix, module in model.named_modules()
            for name, _ in module.named_buffers(recurse=False, remove_duplicate=False)
            if (f"{prefix}.{name}" if prefix else name) in saved
        ]
        self.values: list[Tensor] = []
        self._tensors: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the current values."""
        tensors = [getattr(module, name) for module, name in self.places]
        if [t.shape for t in tensors] != [v.shape for v in self.values]:
            self.values = [tensor.detach().clone() for tensor in tensors]
        elif tensors:
            torch._foreach_copy_(self.values, tensors)  # private, see step.py
        self._tensors = tensors

    @torch.no_grad()
    def swap(self) -> None:
        """Restore the values of the last `keep`, and keep the current values in their place."""
        now = [getattr(module, name).detach().clone() for module, name in self.places]
        self.restore()
        self.values = now

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values of the last `keep`."""
        for (module, name), tensor, value in zip(
            self.places, self._tensors, self.values, strict=True
        ):
            tensor.copy_(value)
            setattr(module, name, tensor)


class BatchStatistics:
    """Average of the micro-batches' changes to the running statistics, over the global batch.

    A layer normalizes with the statistics of its micro-batch, as in plain PyTorch. In plain PyTorch
    the running statistics depend on the order of a rank's micro-batches. Here each micro-batch
    starts from the statistics before the step, and the step adds the mean of all changes: with
    momentum m they become (1 - m) * before + m * (mean over all micro-batches of the global batch).

    A layer in eval mode keeps its statistics bitwise identical.

    Args:
        saved: the model's saved buffers; `keep` must run before a step begins.
        micro_batches: in one step, over all ranks together.

    Attributes:
        numel: of all statistics together.
    """

    def __init__(self, saved: SavedBuffers, micro_batches: int) -> None:
        self._saved = saved
        self._numbers = [
            number for number, (m, _) in enumerate(saved.places) if isinstance(m, _NormBase)
        ]
        self._micro_batches = micro_batches
        buffers = self._buffers()
        self.numel = sum(buffer.numel() for buffer in buffers)
        # All statistics as one float64 vector, and a view of it for each buffer.
        self._start, self._start_of = _vector(buffers)
        self._now, self._now_of = _vector(buffers)
        self._before: list[Tensor] = []

    def begin(self) -> None:
        """Prepare for a step; call it before the first forward pass."""
        if not self.numel:
            return
        self._before = [self._saved.values[number] for number in self._numbers]
        torch._foreach_copy_(self._start_of, self._before)

    def prepare(self) -> None:
        """Reset the statistics to those of `begin`, before the forward pass of a micro-batch.

        Backward also changes the statistics if it recomputes activations.
        """
        if self.numel:
            torch._foreach_copy_(self._buffers(), self._before)

    @torch.no_grad()
    def collect(self, changes: Totals) -> None:
        """Add the changes of a micro-batch to `changes`; call it after its forward pass.

        Args:
            changes: `numel` elements.
        """
        if self.numel:
            torch._foreach_copy_(self._now_of, self._buffers())
            changes.add(self._now.sub_(self._start))

    @torch.no_grad()
    def apply(self, changes: Tensor) -> None:
        """Apply the mean change.

        Args:
            changes: summed over all micro-batches of the global batch.
        """
        if self.numel:
            # Divided after summing: a counter that each micro-batch raises by one rises by one.
            torch.add(self._start, changes / self._micro_batches, out=self._now)
            torch._foreach_copy_(self._buffers(), self._now_of)

    def _buffers(self) -> list[Tensor]:
        # Looked up each time: a forward pass may replace a buffer by a new tensor.
        places = self._saved.places
        return [getattr(*places[number]) for number in self._numbers]


def _vector(buffers: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    sizes = [buffer.numel() for buffer in buffers]
    device = buffers[0].device if buffers else None
    vector = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
    parts = vector.split(sizes) if sizes else ()
    return vector, [p.view_as(b) for p, b in zip(parts, buffers, strict=True)]
