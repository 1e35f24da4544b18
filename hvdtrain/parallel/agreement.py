"""Agreement of ranks that hold shards: all ranks apply an update, or none does."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvdtrain.runtime.collectives import sum_


class Agreement:
    """Barrier before an update: every rank has the gradients of the step.

    After it, no rank can be a step ahead of a rank that cannot follow. If the barrier fails, some
    ranks may have passed it, and others not. A rank that did not pass keeps its gradients, and
    applies its deferred update if it meets a rank that did.

    A rank reaches the barrier when its gradients are complete on its device: Update.prepare has
    read their norm. A collective of NCCL that is aborted later ends as if it were complete.

    Attributes:
        unready: called before each barrier with the number of the step; whether this rank is to be
            counted in `late`. It may wait for a limited time.
        late: number of ranks that `unready` counted at the last barrier.
    """

    def __init__(self) -> None:
        self._pending: tuple[int, Callable[[], None]] | None = None
        self.unready: Callable[[int], bool] = lambda step: False
        self.late = 0

    def wait(self, step: int, apply_deferred: Callable[[], None]) -> None:
        """Wait until all ranks can apply the update of a step.

        Args:
            step: its number.
            apply_deferred: applies the update after this call has failed: it changes all of this
                rank's state without communication.

        Raises:
            RankLostError: another rank is gone. Some rank may have applied the update.
        """
        self._pending = step, apply_deferred
        self.late = int(sum_(torch.tensor([float(self.unready(step))]), "step.agree"))
        self._pending = None

    def forget(self) -> None:
        """Drop the pending update: its gradients are about to be overwritten."""
        self._pending = None

    def reachable_step(self, step: int) -> int:
        """Return the newest step that this rank, which is at `step`, can reach by itself."""
        pending = self._pending is not None and self._pending[0] == step + 1
        return step + 1 if pending else step

    def catch_up(self, step: int, newest: int) -> None:
        """Apply the pending update if another rank, which is at `newest`, has applied it."""
        if step < newest == self.reachable_step(step):
            assert self._pending is not None
            _, apply_deferred = self._pending
            self._pending = None
            apply_deferred()
