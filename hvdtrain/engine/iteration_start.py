"""The state at the start of an iteration of a script's own loop, in an elastic run."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase  # private, see tasks/sync_batchnorm.py

from hvdtrain.engine.state import RunState, Snapshot
from hvdtrain.log import logger

_EXAMINED = 3  # iterations


class IterationStart:
    """Tells whether the script has changed the model before the step's block, and keeps copies.

    Most scripts do not: then the state is still that of the start when a rank is lost in the block.
    If a script does in its first iterations, as schedule-free optimizers require it, the state is
    copied at the start of each iteration from then on.

    Changes are found by the norms of parameters and buffers, which are computed without waiting for
    the device. torch's version counters do not count changes of `parameter.data`.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        modules = [m for m in state.model.modules() if not isinstance(m, _NormBase)]
        self._tensors = [*state.model.parameters()]
        self._buffers = [m._buffers for m in modules if m._buffers]
        self._norms: list[Tensor] = []
        self._examined = 0  # iterations
        self._copies = False
        self.copy: Snapshot | None = None  # of this iteration's start

    def begin(self) -> None:
        """Note the state; an iteration begins."""
        if self._copies:
            self.copy = self.copy or Snapshot(self._state)
            self.copy.keep()
        else:
            self._norms = self._norms_now()

    def enter(self) -> None:
        """Note that the block begins."""
        if self._copies or self._examined == _EXAMINED:
            return
        self._examined += 1
        if self.changed():
            self._copies = True
            logger.debug(
                "the script changes the model before the block of a step: the state is copied at "
                "the start of each iteration, in case that a rank is lost"
            )

    def changed(self) -> bool:
        """Whether the script has changed the model in this iteration, before or after the block."""
        if self.copy is not None:
            return True
        # As bits: NaN is the same as NaN.
        pairs = zip(self._norms, self._norms_now(), strict=True)
        return not all(torch.equal(a.view(torch.int64), b.view(torch.int64)) for a, b in pairs)

    @torch.no_grad()
    def _norms_now(self) -> list[Tensor]:
        buffers = [b for own in self._buffers for b in own.values() if b is not None and b.numel()]
        floats = [t for t in (*self._tensors, *buffers) if t.is_floating_point() and t.numel()]
        others = [b for b in buffers if not b.is_floating_point()]
        # Private, see step.py.
        norms = torch._foreach_norm(floats, 2, dtype=torch.float64) if floats else ()
        return [*norms, *(other.sum() for other in others)]
