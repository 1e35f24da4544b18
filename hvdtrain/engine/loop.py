"""The order of events in a run:

    after a failure: the callbacks of the last step, which some ranks may not have run
    while step < steps and no rank received a stop request:
        the step: micro-batches, exchange, clip, optimizer   (step.py);
            with parallel.zero each rank updates a shard, and all ranks receive the other
            shards after the step is counted;
            with local SGD the ranks step on their own, and their states are averaged
            periodically (local_steps.py)
        step += 1
        for each callback, in the order of the list:
            on_step(loop, record)      evaluate adds to the record, log writes it,
                                       checkpoint saves the state that log recorded
        too many consecutive non-finite steps: end with exit code 3
        processes join or leave: end of this generation
    for each callback: close()         always, also after an error; called by the generation

callbacks/checkpoint.py decides when a checkpoint is due, from its own interval, `Loop.due(1)` (all
ranks hold the same state), `Loop.preempted` and `Loop.ending`.

If a rank is lost, the collective in progress raises RankLostError (HorovodInternalError), which
leaves `run` unhandled; run/session.py handles it and joins the next generation. A step that was not
counted yet is repeated (or taken late, see step.py). If it was counted, the next loop repeats only
its callbacks, with Progress.record.

The loop and all its decisions are identical on every rank: a decision depends on
the configuration, on numbers that all ranks hold, or on sums sent with the exchange.
Code that reads the state (`Loop.due`) does so only when all ranks hold the same state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import BatchConfig
from hvdtrain.data.loader import Batch, TrainLoader
from hvdtrain.engine.config import TrainConfig
from hvdtrain.engine.step import AppliedSteps, Flags, StepResult
from hvdtrain.errors import EXIT_NOT_FINITE
from hvdtrain.log import logger
from hvdtrain.runtime.collectives import AgreedError
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.heartbeat import Activity
from hvdtrain.runtime.signals import StopFlag

StepRecord = dict[str, Any]  # one line of metrics.jsonl
Evaluations = list[list[Any]]  # [step, validation loss or None], see Progress


class MembershipChanged(Exception):
    """All ranks have agreed, after a step, that processes join or leave."""


class Callback(Protocol):
    """One concern that observes the loop. Every rank has the same callbacks."""

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        """Handle a step; may add to `record`.

        After a failure it is called again for the same step, perhaps in a process in which it was
        not called the first time: what was already done must not be done twice.
        """

    def close(self) -> None:
        """Called after the last step, or after an error: no collectives. Default: do nothing."""
        return


@dataclass(frozen=True)
class TrainingPlan:
    """How a run proceeds, identical on every rank.

    Args:
        learning_rate: rate of step s, from 0.
        step_samples: samples of step s, over all ranks together.
        dataset_size: samples of an epoch.
    """

    train: TrainConfig
    batch: BatchConfig
    learning_rate: Callable[[int], float]
    step_samples: Callable[[int], int]
    dataset_size: int


@dataclass(frozen=True)
class Interruptions:
    """Events on this rank that end a loop early; the ranks agree on them in each step.

    Args:
        stop: raised when this rank receives a stop request.
        membership_changed: whether this rank was notified that processes join or leave.
    """

    stop: StopFlag
    membership_changed: Callable[[], bool]


@dataclass
class Progress:
    """Position of a run; saved with each checkpoint.

    Args:
        step: optimizer steps done, including skipped ones
        samples: samples used, which is the position in the sample order
        nonfinite: steps skipped because of a non-finite gradient, which a lower loss scale would
            not have changed
        nonfinite_in_a_row: number of the latest steps that were skipped for this reason
        evaluations: [step, validation loss] from the best evaluation to the latest, for early
            stopping and the best checkpoint; a non-finite loss is None and never the best.
            Identical on all ranks, because the losses are all-reduced
        preempted: the ranks have agreed to stop here
        record: record of the last step, as passed to the callbacks; None if this process has done
            no step
    """

    step: int = 0
    samples: int = 0
    nonfinite: int = 0
    nonfinite_in_a_row: int = 0
    evaluations: Evaluations = field(default_factory=list)
    preempted: bool = False
    record: StepRecord | None = None

    def state_dict(self) -> dict[str, Any]:
        """Fields that a checkpoint keeps."""
        kept = asdict(self)
        del kept["preempted"], kept["record"]
        return kept


class Step(Protocol):
    """One optimizer step: TrainStep, or LocalSteps, which wraps it. See there."""

    def __call__(
        self,
        batches: Iterator[Batch],
        assignment: Assignment,
        lr: float,
        flags: Flags,
        advance: Callable[[StepResult], None] = ...,
    ) -> StepResult: ...

    def complete(self) -> None: ...

    def due(self, step: int, every: int) -> bool: ...


class Loop:
    """Run steps and call the callbacks.

    Args:
        step: runs one step, and calls `_advance` when the state changes.
        loader: this rank's micro-batches, from `progress.samples` on.
        applied: compared with `progress` before each step.
        callbacks: in the order in which they are called.

    Attributes:
        train, batch: training loop and batch sizes of the plan.
        topology: all ranks.
        progress: as given.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        step: Step,
        loader: TrainLoader,
        progress: Progress,
        applied: AppliedSteps,
        callbacks: Sequence[Callback],
        interruptions: Interruptions,
        context: RankContext,
    ) -> None:
        self.train = plan.train
        self.batch = plan.batch
        self.topology = context.mesh.topology
        self.progress = progress
        self._applied = applied
        self._step = step
        self._loader = loader
        self._learning_rate = plan.learning_rate
        self._step_samples = plan.step_samples
        self._dataset_size = plan.dataset_size
        self._callbacks = callbacks
        self._interruptions = interruptions
        self._heartbeat = context.heartbeat
        self._claim = context.claim
        self._membership_changed = False  # as agreed in the last step

    @property
    def assignment(self) -> Assignment:
        """This rank's micro-batches of a step; a callback may change it."""
        return self._loader.assignment

    @property
    def step_samples(self) -> int:
        """Samples of the last step, over all ranks together."""
        return self._step_samples(self.progress.step - 1)

    @property
    def preempted(self) -> bool:
        """Whether the ranks have agreed to stop after this step."""
        return self.progress.preempted

    @property
    def asked_to_stop_at(self) -> float:
        """time.monotonic() of the stop request to this rank; the current time if there was none."""
        return self._interruptions.stop.raised_at or time.monotonic()

    @property
    def ending(self) -> bool:
        """Whether this step is the run's last, or the last before an early or requested stop."""
        last = self.progress.step >= self.train.steps
        return self.progress.preempted or last or self.stopped_early

    @property
    def generation_ends(self) -> bool:
        """Whether this is the generation's last step: pending collectives must be completed."""
        return self.ending or self._membership_changed

    @property
    def stopped_early(self) -> bool:
        """Whether the validation loss has not improved for `train.patience` evaluations."""
        return 0 < self.train.patience <= since_best(self.progress.evaluations)

    def due(self, every: int) -> bool:
        """Whether an action on the state, taken every `every` steps, is due after this step.

        It is due after each step whose number is a multiple of `every`, or if the ranks' states
        differ then (local_steps.py), after the next step at which they are equal. So `due(1)` is
        whether all ranks hold the same state and can save, compare and evaluate it.
        """
        return self._step.due(self.progress.step, every)

    def run(self) -> None:
        """Run until the last step, or until some rank receives a stop request.

        Raises:
            AgreedError: exit code 3, the gradients remained non-finite.
            RankLostError: another rank is gone.
            MembershipChanged: processes join or leave.
        """
        progress = self.progress
        if progress.record is not None:
            # Some ranks may have evaluated this step already; all evaluate it now.
            progress.evaluations = evaluations_before(progress.evaluations, progress.step)
            self._call_back(dict(progress.record))
        while not self.ending:
            record = self._one_step()
            self._call_back(dict(record))
            if self._membership_changed and not self.ending:
                raise MembershipChanged

    def close(self) -> None:
        """Close the callbacks and the loader."""
        for callback in self._callbacks:
            callback.close()
        self._loader.close()

    def _call_back(self, record: StepRecord) -> None:
        for callback in self._callbacks:
            self._heartbeat.beat(Activity.PREPARING)
            callback.on_step(self, record)
        self._check_finite()

    def _one_step(self) -> StepRecord:
        """Run one step, which `_advance` counts, and return its record."""
        progress = self.progress
        self._applied.check(progress.step)
        lr = self._learning_rate(progress.step)
        start = time.perf_counter()
        result = self._step(
            self._loader.next_step(progress.step),
            self.assignment,
            lr,
            Flags(
                stop=self._interruptions.stop.raised,
                membership_changed=self._interruptions.membership_changed(),
                step=progress.step,
            ),
            partial(self._advance, lr, start),
        )
        try:
            self._step.complete()
        finally:
            # The step counts even if the other ranks' parameters did not arrive.
            seconds = time.perf_counter() - start
            progress.record = record = self._record(result, lr, seconds)
        return record

    def _advance(self, lr: float, start: float, result: StepResult) -> None:
        """Count a step, at the moment the parameters change."""
        progress = self.progress
        if not result.applied:
            self._applied.skip()
        progress.step += 1
        progress.samples += result.used.samples
        nonfinite = not result.applied and not result.overflow
        progress.nonfinite_in_a_row = progress.nonfinite_in_a_row + 1 if nonfinite else 0
        progress.nonfinite += nonfinite
        # A stop request in the last step has no effect: the run is finished anyway.
        progress.preempted = result.stop and progress.step < self.train.steps
        self._membership_changed = result.membership_changed
        progress.record = self._record(result, lr, result.ready_at - start)
        if result.overflow and self.topology.rank == 0:
            logger.info(
                "step %d: the gradient overflows with a loss scale of %g; skipped on all ranks",
                progress.step,
                result.loss_scale,
            )

    def _record(self, result: StepResult, lr: float, seconds: float) -> StepRecord:
        progress = self.progress
        return {
            "step": progress.step,
            "loss": result.values["loss"],
            "samples": progress.samples,
            "epoch": progress.samples / self._dataset_size,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "world_size": self.topology.world_size,
            "step_seconds": seconds,
            "samples_per_second": result.used.samples / seconds,
            "time": time.time(),
            "claim": self._claim,
            **{name: value for name, value in result.values.items() if name != "loss"},
            **result.used.metrics(seconds),
            **({} if result.loss_scale is None else {"loss_scale": result.loss_scale}),
            **({} if result.applied else {"skipped": True}),
            **({"overflow": True} if result.overflow else {}),
        }

    def _check_finite(self) -> None:
        in_a_row = self.progress.nonfinite_in_a_row
        if in_a_row and self.topology.rank == 0:
            logger.warning(
                "step %d: the gradient is not finite; skipped on all ranks (%d in a row)",
                self.progress.step,
                in_a_row,
            )
        if in_a_row >= self.train.max_nonfinite:
            raise AgreedError(
                f"the gradient was not finite in {in_a_row} steps in a row, up to step "
                f"{self.progress.step} (train.max_nonfinite); lower optim.lr, lengthen "
                "schedule.warmup_steps or check the data",
                EXIT_NOT_FINITE,
                rank=0,
            )


def with_evaluation(evaluations: Evaluations, step: int, loss: float) -> Evaluations:
    """Add an evaluation.

    It replaces an earlier one of the same step: after a failure, ranks that had evaluated this step
    evaluate it again with the others, so that all hold the same evaluations.
    """
    before = evaluations_before(evaluations, step)
    if before:
        before = before[_best(before) :]
    return [*before, [step, loss if math.isfinite(loss) else None]]


def evaluations_before(evaluations: Evaluations, step: int) -> Evaluations:
    return [one for one in evaluations if one[0] < step]


def since_best(evaluations: Evaluations) -> int:
    """Number of evaluations after the best one."""
    return len(evaluations) - 1 - _best(evaluations) if evaluations else 0


def is_best(evaluations: Evaluations, step: int) -> bool:
    """Whether the latest evaluation is of this step, and its loss is lower than all before."""
    if not evaluations or evaluations[-1][0] != step or evaluations[-1][1] is None:
        return False
    return since_best(evaluations) == 0


def _best(evaluations: Sequence[Sequence[Any]]) -> int:
    """Index of the first evaluation with the lowest loss."""
    losses = [math.inf if loss is None else loss for _, loss in evaluations]
    return losses.index(min(losses))
