"""The state at the start of an iteration of a script's own loop, in an elastic run."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase  # private, see tasks/sync_batchnorm.py

from hvdtrain.engine.state import RunState, Snapshot
from hvdtrain.log import logger

_EXAMINED = 3  # iterations


class IterationStart:
    """Tells whether the script has changed the state before the micro-batches, and keeps copies.

    Most scripts do not: then the state is still that of the start when a rank is lost in the block.
    If a script does in its first iterations, as schedule-free optimizers require it, the state is
    copied at the start of each iteration from then on.

    Changes are found by the norms of parameters and saved buffers, which are computed without
    waiting for the device: torch's version counters do not count changes of `parameter.data`. Of
    the optimizer's state, only these counters are compared.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._modules = [module for module in state.model.modules() if module._buffers]
        self._parameters = [*state.model.parameters()]
        self._norms: list[Tensor] = []
        self._versions: list[tuple[int, int]] = []
        self._examined = 0  # iterations
        self._copies = False
        self.copy: Snapshot | None = None  # of this iteration's start

    def begin(self) -> None:
        """Note the state; an iteration begins."""
        self._norms, self._versions = self._norms_now(), self._versions_now()
        if self._copies:
            self.copy = kept(self._state, self.copy)

    def enter(self) -> None:
        """Note that the first micro-batch begins."""
        if self._copies or self._examined == _EXAMINED:
            return
        self._examined += 1
        if self.changed():
            self._copies = True
            logger.debug(
                "the script changes its state before the micro-batches of a step: the state is "
                "copied at the start of each iteration, in case that a rank is lost"
            )

    def changed(self) -> bool:
        """Whether the script has changed model or optimizer in this iteration."""
        now = self._norms_now()
        if len(now) != len(self._norms) or self._versions_now() != self._versions:
            return True
        # As bits: NaN is the same as NaN.
        pairs = zip(self._norms, now, strict=True)
        return not all(torch.equal(a.view(torch.int64), b.view(torch.int64)) for a, b in pairs)

    @torch.no_grad()
    def _norms_now(self) -> list[Tensor]:
        buffers = [
            (module, buffer)
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        tensors = [*self._parameters, *(buffer for _, buffer in buffers)]
        floats = [t for t in tensors if t.is_floating_point() and t.numel()]
        # A counter for each BatchNorm would take longer than all the rest.
        others = [
            buffer
            for module, buffer in buffers
            if not isinstance(module, _NormBase)
            and not (buffer.is_floating_point() or buffer.is_complex())
        ]
        # Private, see step.py.
        norms = torch._foreach_norm(floats, 2, dtype=torch.float64) if floats else ()
        return [*norms, *(other.sum(dtype=torch.int64) for other in others)]

    def _versions_now(self) -> list[tuple[int, int]]:
        states = [s for s in self._state.optimizer.state.values() if isinstance(s, dict)]
        tensors = [value for state in states for value in state.values()]
        return [(id(t), t._version) for t in tensors if isinstance(t, Tensor)]


def kept(state: RunState, into: Snapshot | None = None) -> Snapshot:
    """Return a copy of the state; in the memory of the CPU if the device has too little."""
    try:
        copy = into or Snapshot(state)
        copy.keep()
    except torch.OutOfMemoryError:
        copy = Snapshot(state, torch.device("cpu"))
        copy.keep()
    return copy
