"""The run's state as all ranks last had it in common, for ranks that step on their own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hvdtrain.engine.loop import Progress
from hvdtrain.engine.state import RunState


class Snapshot:
    """A copy in memory, beside the tensors themselves, of the replicated parts and the progress.

    A failure between two synchronisations leaves ranks with states of their own, of which none
    counts: those that are left go back to this one.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._progress = Progress()
        self._tensors: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """Copies the state of now."""
        self._progress = replace(self._state.progress)
        for part in self._state.of_scope("replicated"):
            kept, now = self._tensors.setdefault(part.name, {}), part.tensors()
            for gone in kept.keys() - now.keys():
                del kept[gone]
            for name, tensor in now.items():
                if name in kept and kept[name].shape == tensor.shape:
                    kept[name].copy_(tensor)
                else:
                    kept[name] = tensor.detach().clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Brings back what the last `keep` saw."""
        for part in self._state.of_scope("replicated"):
            # Copies: an optimizer would go on with the tensors that it is given.
            part.load([{name: t.clone() for name, t in self._tensors[part.name].items()}])
        vars(self._state.progress).update(vars(self._progress))
