"""BatchNorm's running statistics, the same on any number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hvdtrain.runtime.collectives import begin_sum, completed
from hvdtrain.runtime.context import RankContext


class BatchStatistics:
    """Averages over the micro-batches of the global batch what each of them did to the statistics.

    A layer normalises with the statistics of its micro-batch, as in plain PyTorch. Its running
    statistics would follow from the order of a rank's micro-batches; here each micro-batch starts
    from those before the step, and the step adds the mean of all changes: with momentum m they
    become (1 - m) * before + m * (mean over all micro-batches of the global batch).

    A layer in eval mode keeps its statistics to the last bit.

    Args:
        micro_batches: in one step, over all ranks together.
    """

    def __init__(self, model: nn.Module, micro_batches: int, context: RankContext) -> None:
        layers = [layer for layer in model.modules() if isinstance(layer, _NormBase)]
        self._layers = [layer for layer in layers if layer.running_mean is not None]
        self._micro_batches = micro_batches
        self._context = context
        self._before: list[Tensor] = []
        self._changes: list[Tensor] = []
        self._vector = torch.zeros(0)
        self._handle: int | None = None

    def begin(self) -> None:
        """Before a step's first forward pass."""
        self._before = [buffer.clone() for buffer in self._buffers()]
        self._changes = [torch.zeros_like(b, dtype=torch.float64) for b in self._before]

    def prepare(self) -> None:
        """Before the forward pass of a micro-batch: it starts from the statistics of `begin`.

        Backward changes them too, where it computes activations a second time.
        """
        for now, before in zip(self._buffers(), self._before, strict=True):
            now.copy_(before)

    @torch.no_grad()
    def collect(self) -> None:
        """After the forward pass of a micro-batch: adds up what it has changed."""
        for total, now, before in zip(self._changes, self._buffers(), self._before, strict=True):
            total += now.double() - before

    def send(self) -> None:
        """Begins the exchange, after the last forward pass."""
        if not self._layers:
            return
        self._vector = torch.cat([change.flatten() for change in self._changes])
        if self._context.mesh.data.size > 1:
            self._handle = begin_sum(self._vector, "statistics")

    @torch.no_grad()
    def apply(self) -> None:
        """Waits for the exchange, and makes the change.

        Raises:
            RankLostError: another rank is gone.
        """
        if not self._layers:
            return
        if self._handle is not None:
            handle, self._handle = self._handle, None
            completed(handle)
        # Divided here: a count that all micro-batches raise by one is raised by exactly one.
        changes = (self._vector / self._micro_batches).split([b.numel() for b in self._before])
        for now, before, change in zip(self._buffers(), self._before, changes, strict=True):
            now.copy_(before + change.view_as(before))

    def _buffers(self) -> list[Tensor]:
        # Looked up anew: a forward pass may put a new tensor in a buffer's place.
        return [buffer for layer in self._layers for buffer in layer.buffers(recurse=False)]
