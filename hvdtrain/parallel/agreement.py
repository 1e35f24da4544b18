"""Agreement of ranks that hold shards: all ranks take a step, or none does."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvdtrain.runtime.collectives import sum_


class Agreement:
    """Wait before a step until every rank has the gradients of the step.

    After that, no rank can be a step ahead of a rank that cannot follow: a rank that was not
    notified that all ranks are ready keeps its gradients, and takes the step when it meets a rank
    that took it.
    """

    def __init__(self) -> None:
        self._pending: tuple[int, Callable[[], None]] | None = None

    def __call__(self, step: int, take: Callable[[], None]) -> None:
        """Wait until all ranks can take a step.

        Args:
            step: its number.
            take: takes this step later, after this call has failed: it changes all of this rank's
                state without communication.

        Raises:
            RankLostError: another rank is gone. Some rank may have taken the step.
        """
        self._pending = step, take
        sum_(torch.zeros(1), "step.agree")
        self._pending = None

    def forget(self) -> None:
        """Drop the pending step: its gradients are about to be overwritten."""
        self._pending = None

    def reachable_step(self, step: int) -> int:
        """Return the newest step that this rank, which is at `step`, can reach by itself."""
        pending = self._pending is not None and self._pending[0] == step + 1
        return step + 1 if pending else step

    def catch_up(self, step: int, newest: int) -> None:
        """Take the pending step if another rank, which is at `newest`, has taken it."""
        if step < newest == self.reachable_step(step):
            assert self._pending is not None
            _, take = self._pending
            self._pending = None
            take()
