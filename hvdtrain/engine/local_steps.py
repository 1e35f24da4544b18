"""Optimizer steps of local SGD: the ranks step on their own, and their states are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hvdtrain.data.assignment import Assignment
from hvdtrain.data.loader import Batch
from hvdtrain.engine.step import Flags, StepResult, TrainStep
from hvdtrain.exchange.local_sgd import LocalSgd
from hvdtrain.runtime.context import RankContext


class LocalSteps:
    """Wrap TrainStep: after some steps, give all ranks the same state again.

    The states are averaged every `exchange.every` steps, after the run's last step, and after a
    step in which the ranks agreed to stop or that processes join or leave. In between they differ:
    a step that fails may change some of the state, and Snapshot holds the state to restore.

    Args:
        step: runs a step.
        exchange: the exchange of `step`.
        last: number of the run's last step.
    """

    def __init__(
        self, step: TrainStep, exchange: LocalSgd, last: int, context: RankContext
    ) -> None:
        self._step = step
        self._exchange = exchange
        self._last = last
        self._timer = context.timer
        self._phase = "comm_exposed" if context.mesh.world.size > 1 else "other"

    def __call__(
        self,
        batches: Iterator[Batch],
        assignment: Assignment,
        lr: float,
        flags: Flags,
        advance: Callable[[StepResult], None] = lambda result: None,
    ) -> StepResult:
        """Run one step, see TrainStep, and average the ranks' states if it is due."""
        result = self._step(batches, assignment, lr, flags, advance)
        step = flags.step + 1
        pauses = result.stop or result.membership_changed
        if pauses or step % self._exchange.every == 0 or step >= self._last:
            with self._timer.inside(self._phase):
                self._exchange.average()
        return result

    def complete(self) -> None:
        """See TrainStep."""
        self._step.complete()

    def due(self, step: int, every: int) -> bool:
        """Postpone an action on the state that was due between two averages to the second one."""
        if self._exchange.diverged:
            return False
        before = (step - 1) // self._exchange.every * self._exchange.every
        return step // every > before // every
