"""A copy of the run's state, to go back to."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hvdtrain.engine.loop import Progress
from hvdtrain.engine.state import RunState


class Snapshot:
    """A copy in memory of the replicated parts and the progress.

    Ranks that step on their own keep their last common state: a failure between two
    synchronisations leaves them with states of which none counts. A rank that receives a newer
    state keeps its own one until the newer one is complete.

    Args:
        device: that holds the copy; default: each tensor's own.
    """

    def __init__(self, state: RunState, device: torch.device | None = None) -> None:
        self._state = state
        self._device = device
        self._progress = Progress()
        self._applied = 0
        self._tensors: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """Copies the state of now."""
        self._progress = replace(self._state.progress)
        self._applied = self._state.applied.count
        for part in self._state.of_scope("replicated"):
            kept, now = self._tensors.setdefault(part.name, {}), part.tensors()
            for gone in kept.keys() - now.keys():
                del kept[gone]
            for name, tensor in now.items():
                if name in kept and kept[name].shape == tensor.shape:
                    kept[name].copy_(tensor)
                else:
                    kept[name] = tensor.detach().to(self._device or tensor.device, copy=True)

    @torch.no_grad()
    def restore(self) -> None:
        """Brings back what the last `keep` saw."""
        for part in self._state.of_scope("replicated"):
            # Copies: an optimizer would go on with the tensors that it is given.
            part.load([{name: t.clone() for name, t in self._tensors[part.name].items()}])
        vars(self._state.progress).update(vars(self._progress))
        self._state.applied.count = self._applied
