"""Optimizer steps of local SGD: the ranks step on their own, and their states are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hvdtrain.data.assignment import Assignment
from hvdtrain.data.loader import Batch
from hvdtrain.engine.accumulate import RankPasses
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
        self._number = 0  # of the step that has begun, from 1
        self._timer = context.timer
        self._phase = "comm_exposed" if context.mesh.world.size > 1 else "other"

    def begin(self, batches: Iterator[Batch], assignment: Assignment, flags: Flags) -> None:
        """See TrainStep."""
        self._number = flags.step + 1
        self._step.begin(batches, assignment, flags)

    def end(
        self,
        lr: float | None,
        advance: Callable[[StepResult], None] = lambda result: None,
        loss_limit: float | None = None,
    ) -> StepResult:
        """End the step, see TrainStep, and average the ranks' states if it is due."""
        result, step = self._step.end(lr, advance, loss_limit), self._number
        if any(result.requests) or step % self._exchange.every == 0 or step >= self._last:
            with self._timer.inside(self._phase):
                self._exchange.average()
        return result

    def train(self) -> None:
        """See TrainStep."""
        self._step.train()

    def passes(self) -> RankPasses:
        """See TrainStep."""
        return self._step.passes()

    def exchange(self) -> None:
        """See TrainStep."""
        self._step.exchange()

    def fail(self) -> None:
        """See TrainStep."""
        self._step.fail()

    def complete(self) -> None:
        """See TrainStep."""
        self._step.complete()

    def due(self, step: int, every: int) -> bool:
        """Postpone an action on the state that was due between two averages to the second one."""
        if self._exchange.diverged:
            return False
        before = (step - 1) // self._exchange.every * self._exchange.every
        return step // every > before // every
