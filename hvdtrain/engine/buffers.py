"""A model's saved buffers in a step.

SavedBuffers keeps their values in case the step fails. BatchStatistics makes BatchNorm's running
statistics the same on any number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # private, see tasks/sync_batchnorm.py

from hvdtrain.engine.control import Totals


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
            for name, _ in module.named_buffers(recurse=False, remove_duplicate=False)
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
            torch._foreach_copy_(self.values, tensors)  # private, see step.py
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


class BatchStatistics:
    """Averages over the micro-batches of the global batch what each of them did to the statistics.

    A layer normalises with the statistics of its micro-batch, as in plain PyTorch. Its running
    statistics would follow from the order of a rank's micro-batches; here each micro-batch starts
    from those before the step, and the step adds the mean of all changes: with momentum m they
    become (1 - m) * before + m * (mean over all micro-batches of the global batch).

    A layer in eval mode keeps its statistics to the last bit.

    Args:
        saved: of the model; it has kept the values of before the step when a step begins.
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
        # All of them as one vector, float64, and a view of it for each buffer.
        self._start, self._start_of = _vector(buffers)
        self._now, self._now_of = _vector(buffers)
        self._before: list[Tensor] = []

    def begin(self) -> None:
        """Before a step's first forward pass."""
        if not self.numel:
            return
        self._before = [self._saved.values[number] for number in self._numbers]
        torch._foreach_copy_(self._start_of, self._before)

    def prepare(self) -> None:
        """Before the forward pass of a micro-batch: it starts from the statistics of `begin`.

        Backward changes them too, where it computes activations a second time.
        """
        if self.numel:
            torch._foreach_copy_(self._buffers(), self._before)

    @torch.no_grad()
    def collect(self, changes: Totals) -> None:
        """After the forward pass of a micro-batch.

        Args:
            changes: `numel` of them: what it has changed is added.
        """
        if self.numel:
            torch._foreach_copy_(self._now_of, self._buffers())
            changes.add(self._now.sub_(self._start))

    @torch.no_grad()
    def apply(self, changes: Tensor) -> None:
        """Makes the change.

        Args:
            changes: summed over all micro-batches of the global batch.
        """
        if self.numel:
            # Divided here: a count that all micro-batches raise by one is raised by exactly one.
            torch.add(self._start, changes / self._micro_batches, out=self._now)
            torch._foreach_copy_(self._buffers(), self._now_of)

    def _buffers(self) -> list[Tensor]:
        # Looked up anew: a forward pass may put a new tensor in a buffer's place.
        places = self._saved.places
        return [getattr(*places[number]) for number in self._numbers]


def _vector(buffers: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    sizes = [buffer.numel() for buffer in buffers]
    device = buffers[0].device if buffers else None
    vector = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
    parts = vector.split(sizes) if sizes else ()
    return vector, [p.view_as(b) for p, b in zip(parts, buffers, strict=True)]
