"""The order of events in a run:

    after a failure: the callbacks of the last step, which some ranks may not have run
    while step < steps and no rank received a stop request:
        the step: micro-batches, exchange, clip, optimizer   (step.py);
            with parallel.shard.stage 1 each rank updates a shard, and all ranks receive the other
            shards after the step is counted;
            with local SGD the ranks step on their own, and their states are averaged
            periodically (local_sgd.py)
        step += 1
        for each callback, in the order of the list:
            on_step(loop, record)      evaluate adds to the record, log writes it,
                                       checkpoint saves the state that log recorded
        too many consecutive non-finite steps: end with exit code 3
        a loss spike with train.spike.action rollback: end of this generation, without callbacks
        processes join or leave: end of this generation
    for each callback: close()         always, also after an error; called by the generation

callbacks/checkpoint.py decides when a checkpoint is due, from its own interval,
`Loop.ranks_in_sync`, `Loop.preempted` and `Loop.ending`.

If a rank is lost, the collective in progress raises RankLostError (HorovodInternalError), which
leaves `run` unhandled; process/session.py handles it and joins the next generation. A step that was
not counted yet is repeated (or its deferred update is applied, see step.py). If it was counted, the
next loop repeats only its callbacks, with Progress.record.

The loop and all its decisions are identical on every rank: a decision depends on the configuration,
on numbers that all ranks hold, or on sums sent with the exchange. Code that reads the state
(`Loop.due`, `Loop.ranks_in_sync`) does so only when all ranks hold the same state.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from hvdtrain import comm
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import BatchConfig
from hvdtrain.data.loader import (
    AFTER_SEED,
    BLOCK_SEED,
    STEP_SEED,
    UPDATE_SEED,
    Batch,
    StepLoader,
)
from hvdtrain.data.samples import require_same_samples
from hvdtrain.engine.accumulate import RankPasses
from hvdtrain.engine.config import TrainConfig
from hvdtrain.engine.replay import StepDiscarded
from hvdtrain.engine.script_state import ScriptState
from hvdtrain.engine.spikes import Spike, exceeds, loss_limit, passed_over
from hvdtrain.engine.step import NO_REQUESTS, AppliedSteps, Flags, Requests, StepResult, TrainStep
from hvdtrain.errors import EXIT_NOT_FINITE, UserError
from hvdtrain.log import logger
from hvdtrain.runtime.collectives import AgreedError, RankLostError
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.device import seed_all
from hvdtrain.runtime.heartbeat import Activity
from hvdtrain.runtime.signals import StopFlag

Value = Tensor | tuple[Any, Any]
StepRecord = dict[str, Any]  # one line of metrics.jsonl
Evaluations = list[list[Any]]  # [step, validation loss or None], see Progress


OUTSIDE = (
    "called outside the block of a step, where a lost rank could not be handled: call it inside "
    "`with step:`, or in the function given to training.evaluate"
)


class MembershipChanged(Exception):
    """All ranks have agreed, after a step, that processes join or leave."""


class SpikeRollback(Exception):
    """All ranks have agreed, after a step, to return to a checkpoint, see Progress.spike."""


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
        learning_rate: rate of step s, from 0; None: the optimizer's own.
        step_samples: samples of global batch b of the order, from 0, over all ranks together.
        dataset_size: samples of an epoch; 0 if unknown.
        seed: the run's seed.
    """

    train: TrainConfig
    batch: BatchConfig
    learning_rate: Callable[[int], float | None]
    step_samples: Callable[[int], int]
    dataset_size: int
    seed: int = 0


@dataclass(frozen=True)
class Interruptions:
    """Events on this rank that end a loop early; the ranks agree on them in each step.

    Args:
        stop: raised when this rank receives a stop request.
        membership_changed: whether this rank was notified that processes join or leave.
        finish: whether this rank's script wants the next step to be the last one.
    """

    stop: StopFlag
    membership_changed: Callable[[], bool]
    finish: Callable[[], bool] = lambda: False

    def requests(self) -> Requests:
        return Requests(self.stop.raised, self.membership_changed(), self.finish())


@dataclass
class Progress:
    """Position of a run; saved with each checkpoint.

    Args:
        step: optimizer steps done, including skipped ones
        samples: samples used or passed over, which is the position in the sample order
        nonfinite: steps skipped because of a non-finite gradient, which a lower loss scale would
            not have changed
        nonfinite_in_a_row: number of the latest steps that were skipped for this reason
        losses: with train.spike, the losses of the last applied steps
        spikes: steps whose loss was a spike, including those that a rollback has undone
        spikes_in_a_row: number of the latest steps whose loss was a spike
        rollbacks: returns to a checkpoint because of a spike, see spikes.Rollback
        evaluations: [step, validation loss] from the best evaluation to the latest, for early
            stopping and the best checkpoint; a non-finite loss is None and never the best.
            Identical on all ranks, because the losses are all-reduced
        preempted: the ranks have agreed to stop here
        record: record of the last step, as passed to the callbacks; None if this process has done
            no step
        spike: the last step was this spikes.Spike, and the ranks have agreed to return to a
            checkpoint; such a state is never saved
    """

    step: int = 0
    samples: int = 0
    nonfinite: int = 0
    nonfinite_in_a_row: int = 0
    losses: list[float] = field(default_factory=list)
    spikes: int = 0
    spikes_in_a_row: int = 0
    rollbacks: list[list[int]] = field(default_factory=list)
    evaluations: Evaluations = field(default_factory=list)
    preempted: bool = False
    record: StepRecord | None = None
    spike: dict[str, Any] | None = None

    @property
    def batch(self) -> int:
        """Number of global batches used or passed over: the next one's number in the order."""
        return self.step + passed_over(self.rollbacks)

    def state_dict(self) -> dict[str, Any]:
        """Fields that a checkpoint keeps."""
        kept = asdict(self)
        del kept["preempted"], kept["record"], kept["spike"]
        return kept


class ScriptIteration(Protocol):
    """The iteration of a script's own loop, see engine/iteration.py."""

    script: ScriptState

    def begin(self, step: Step) -> Step: ...

    def restore(self) -> None: ...

    def enter(self) -> None: ...

    def count(self) -> None: ...

    def keep(self) -> None: ...

    def end(self) -> None: ...

    def check_structure(self) -> None: ...


class Step:
    """One optimizer step: `with step:` runs it, over the global batch.

    The built-in loop calls `run`, which trains with the task's loss. A script with its own loop
    iterates over the step inside the block, which gives this rank's micro-batches, and calls
    `backward` once for each of them. When the iteration ends, each `parameter.grad` is the gradient
    of the global batch, and the script may change it, identically on all ranks, in the rest of the
    block.

    If a rank is lost inside the block, the block ends without an error. The parameters are as
    before the step, `done` is False, the code after the block has no lasting effect, and the loop
    repeats the step on the surviving ranks, see engine/iteration.py.

    Attributes:
        index: number of the step in the run, from 0.
        done: the step counts: the parameters were updated, or the gradient was not finite.
        values: logged with this step.
        open: its block is being run.
        began: its block has begun.
        failed: a rank was lost in its block.
        updating: the optimizer may step now.
        passing: hvdtrain runs backward passes now.
    """

    def __init__(self, loop: Loop, index: int) -> None:
        self.index, self.done = index, False
        self.values: dict[str, float] = {}
        self._result: Mapping[str, float] | None = None
        self._loop = loop
        self._batch = loop.progress.batch
        self.began = self.open = self.failed = False
        self.updating = self.passing = False
        # Of a micro-batch, until its last backward pass: losses by optimizer, and metrics.
        self._losses: dict[str, Tensor] = {}
        self._metrics: dict[str, Value] = {}
        self._scalars: dict[int, tuple[Value, Value]] = {}  # as given, and as scalars, by id
        self._failure: Exception | None = None
        self._passes: RankPasses | None = None
        self._exchanged = False
        self._broken: Exception | None = None  # the exchange has failed

    def __enter__(self) -> Step:
        if self.began or self._loop.current is not self:
            raise UserError(
                f"step {self.index + 1} was entered again, or after its turn: each step of the "
                "loop has one `with step:` block"
            )
        self.began = True
        self._loop.begin_step()
        self.open = True
        comm.COLLECTIVES.refuse("")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        try:
            return self._close(error)
        finally:
            self._loop.seed(self._batch, AFTER_SEED)

    def _close(self, error: BaseException | None) -> bool:
        self.open = False
        self._loop.refuse_collectives()
        if error is not None:
            self._loop.fail_step()
            return self._fail(error)
        try:
            if self._broken is not None:  # the script has handled it
                self._loop.fail_step()
                raise self._broken
            complete = self._passes.complete if self._passes else not len(self._loop.assignment)
            if not self._exchanged and not complete:
                self._loop.fail_step()
                raise UserError(
                    f"step {self.index + 1}: the block ended before step.backward was called for "
                    "each micro-batch of this rank: the gradient of the global batch would be "
                    "wrong. The step gives its micro-batches: for batch in step: "
                    "step.backward(loss)"
                )
            if not self._exchanged:  # the script has not asked for a micro-batch after the last
                try:
                    self._end_micro_batches()
                except Exception:
                    self._loop.fail_step()
                    raise
            self.updating = True
            self._loop.seed_update(self._batch)
            self._loop.end_step()
        except RankLostError as lost:
            return self._fail(lost)
        finally:
            self.updating = False
            self.done = self._loop.progress.step > self.index
            if self.done and not self.failed:
                self._result = self._loop.result
        return False

    def _fail(self, error: BaseException) -> bool:
        """Note the loss of a rank, which the loop handles; return False for any other error."""
        if not isinstance(error, RankLostError):
            return False
        self.abandon()
        self._failure = error
        self._loop.keep_for_repetition()
        return True

    def abandon(self) -> None:
        """Let the rest of the iteration run without effect."""
        self.failed, self._result = True, defaultdict(lambda: math.nan)

    @property
    def result(self) -> Mapping[str, float]:
        """After the block: "loss", "grad_norm" and the metrics, as means over the global batch.

        All are NaN if the block ended because a rank was lost, and the step will be repeated.

        Raises:
            UserError: the block has not ended.
        """
        if self._result is None:
            raise UserError("step.result is known after the step's block")
        return self._result

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over this rank's micro-batches, on its device; there may be none."""
        if not self.open or self._passes is not None:
            raise UserError(
                "a step gives its micro-batches once, inside its block: with step: for batch in "
                "step: ..."
            )
        self._passes = self._loop.open_passes()
        return self._micro_batches(self._passes)

    def _micro_batches(self, passes: RankPasses) -> Iterator[Batch]:
        yield from passes
        self._end_micro_batches()

    def _end_micro_batches(self) -> None:
        self._loop.seed(self._batch, BLOCK_SEED)
        self._exchange()

    def _exchange(self) -> None:
        self._exchanged = self.passing = True
        try:
            self._loop.exchange()
        except Exception as error:
            self._broken = error
            raise
        finally:
            self.passing = False

    def backward(self, loss: Value, *, optimizer: str | None = None, **metrics: Value) -> None:
        """Run the backward pass of the micro-batch that was taken last.

        With several optimizers and one loss for all parameters it is called once, without the name
        of an optimizer. With several losses it is called once for each optimizer, and computes the
        gradients of its parameters alone. All of them step at the end of the block.

        Args:
            loss: a scalar tensor, the mean over the micro-batch's samples; or (sum, weight), such
                as the sum over its tokens and their number. The step's gradient is that of the mean
                over the global batch.
            optimizer: name of the optimizer, if there are several; the loss is then a mean. Losses
                of different optimizers may be the same tensor, or share a graph.
            metrics: further values of the same form, averaged and logged.

        Raises:
            UserError: there is no such micro-batch or optimizer, a metric is missing or unknown, or
                the loss is not a scalar that depends on a trained parameter, or the model has
                other layers or buffers than at the start of the loop.
        """
        if not self.open or self._passes is None:
            raise UserError(
                "step.backward is called inside the step's block, once for each micro-batch: with "
                "step: for batch in step: step.backward(loss)"
            )
        self._loop.check_structure()
        # Once per tensor: several optimizers may have the same loss.
        loss = self._scalars.setdefault(id(loss), (loss, _scalar_loss(loss, optimizer)))[1]
        self.passing = True
        try:
            self._backward(loss, optimizer, metrics)
        finally:
            self.passing = False

    def _backward(self, loss: Value, optimizer: str | None, metrics: dict[str, Value]) -> None:
        assert self._passes is not None
        several, parameters, total = self._loop.optimizers, None, loss
        if several is None:
            if optimizer is not None:
                raise UserError(
                    f"step.backward: there is one optimizer, so none is called {optimizer}"
                )
        elif optimizer is None and not self._losses:
            metrics = {**{f"{name}_loss": loss for name in several}, **metrics}
        else:
            if optimizer not in several or not isinstance(loss, Tensor):
                raise UserError(
                    f"step.backward got the optimizer {optimizer!r}: with several optimizers it is "
                    f"step.backward(mean, optimizer=NAME), once for each of {', '.join(several)}, "
                    "or once without a name if all have the same loss"
                )
            parameters = several[optimizer]
            if optimizer in self._losses:
                raise UserError(f"step.backward was called twice for the optimizer {optimizer}")
            self._losses[optimizer] = loss
            self._metrics |= metrics
            missing = several.keys() - self._losses.keys()
            self._passes.lacking = _lacking(missing)
            if missing:
                others = [p for name in missing for p in several[name]]
                self._passes.backward_of_some(loss, parameters, others)
                return
            losses, self._losses = self._losses, {}
            metrics, self._metrics = self._metrics, {}
            metrics |= {f"{name}_loss": losses[name].detach() for name in several}
            # A loss that several optimizers have counts once.
            different = {id(losses[name]): losses[name].detach() for name in several}
            total = torch.stack([*different.values()]).sum()
        self._scalars.clear()
        forward = self._passes.forward
        if metrics.keys() != {*forward.names[1:]}:
            raise UserError(
                f"step.backward got the metrics {sorted(metrics)}, but training(metrics=...) "
                f"names {sorted(forward.names[1:])}"
            )
        values = forward.values({"loss": total, **metrics}, forward.names)
        if total is not loss:
            values = values._replace(loss=torch.as_tensor(loss))
        self._passes.backward(values, parameters)

    def run(self) -> None:
        """Run the step with the task's loss; `check` raises what fails."""
        try:
            with self:
                self._loop.train_step()
                self._exchange()
        except Exception as error:
            self._failure = error

    def check(self) -> None:
        """Raise the step's failure, or UserError if its block was not run."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if not self.began:
            raise UserError(
                f"the loop left out the block of step {self.index + 1}: each step needs `with "
                "step:`, on every rank"
            )


def _lacking(optimizers: Collection[str]) -> str:
    if not optimizers:
        return ""
    return (
        f" with the loss of {', '.join(sorted(optimizers))} (to leave out an optimizer in a step, "
        "call it with any loss, and set the gradients of its parameters to None after the "
        "micro-batches)"
    )


def _scalar_loss(loss: Value, optimizer: str | None) -> Value:
    """Return a loss, as given to Step.backward, without dimensions of size 1.

    Raises:
        UserError: no backward pass can begin at it.
    """
    scalar = loss[0] if isinstance(loss, tuple) and loss else loss
    if not isinstance(scalar, Tensor):
        problem = f"a {type(scalar).__name__}"
    elif scalar.numel() != 1:
        problem = f"a tensor of shape {tuple(scalar.shape)}"
    elif not scalar.requires_grad and optimizer is None:  # the others may train
        problem = "a tensor without gradient: detached, or of no trained parameter"
    elif scalar.dim():
        return (scalar.reshape(()), *loss[1:]) if isinstance(loss, tuple) else scalar.reshape(())
    else:
        return loss
    raise UserError(
        f"step.backward got {problem}: the loss is a scalar tensor, the mean over the "
        "micro-batch's samples, or (sum, weight), computed from the model's parameters"
    )


class Loop:
    """Run steps and call the callbacks.

    Args:
        step: takes the steps, and calls `_advance` when the state changes.
        loader: this rank's micro-batches, from `progress.samples` on.
        applied: compared with `progress` before each step.
        iteration: of a script with its own loop; None: the built-in loop.
        callbacks: in the order in which they are called.

    Attributes:
        train, batch: training loop and batch sizes of the plan.
        optimizers: parameters of each optimizer by name; None: there is one optimizer.
        topology: all ranks.
        progress: as given.
        result: of the last step, see Step.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        step: TrainStep,
        loader: StepLoader,
        progress: Progress,
        applied: AppliedSteps,
        callbacks: Sequence[Callback],
        interruptions: Interruptions,
        context: RankContext,
        iteration: ScriptIteration | None = None,
    ) -> None:
        self.train = plan.train
        self._iteration = iteration
        self.optimizers = iteration.script.parameters if iteration is not None else None
        self.batch = plan.batch
        self.topology = context.mesh.topology
        self.progress = progress
        self._applied = applied
        self._step = step
        self._loader = loader
        self._learning_rate = plan.learning_rate
        self._step_samples = plan.step_samples
        self._dataset_size = plan.dataset_size
        self._seed = plan.seed
        self._callbacks = callbacks
        self._interruptions = interruptions
        self._heartbeat = context.heartbeat
        self._claim = context.claim
        self._requests = NO_REQUESTS  # as agreed in the last step
        self._began = 0.0  # time.perf_counter() at the start of the step
        self.current: Step | None = None
        self.result: dict[str, float] = {}

    @property
    def assignment(self) -> Assignment:
        """This rank's micro-batches of a step; a callback may change it."""
        return self._loader.assignment

    @property
    def step_samples(self) -> int:
        """Samples of the last step, over all ranks together."""
        return self._step_samples(self.progress.batch - 1)

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
        return self.progress.preempted or last or self.stopped_early or self._requests.finish

    @property
    def generation_ends(self) -> bool:
        """Whether this is the generation's last step: pending collectives must be completed."""
        return self.ending or self._requests.membership_changed

    @property
    def stopped_early(self) -> bool:
        """Whether the validation loss has not improved for `train.patience` evaluations."""
        return 0 < self.train.patience <= since_best(self.progress.evaluations)

    def due(self, every: int) -> bool:
        """Whether an action on the state, taken every `every` steps, is due after this step.

        It is due after each step whose number is a multiple of `every`, or if the ranks' states
        differ then (local_sgd.py), after the next step at which they are equal.
        """
        return self._step.due(self.progress.step, every)

    @property
    def ranks_in_sync(self) -> bool:
        """Whether all ranks hold the same state, and can save, compare and evaluate it."""
        return self.due(every=1)

    def run(self) -> None:
        """Run all steps with the task's loss; raises what `steps` raises."""
        for step in self.steps():
            step.run()

    def steps(self) -> Iterator[Step]:
        """Yield each step until the last one, or until some rank receives a stop request.

        Raises:
            AgreedError: exit code 3, the gradients remained non-finite.
            RankLostError: another rank is gone.
            MembershipChanged: processes join or leave.
            SpikeRollback: the loss of the last step was a spike.
        """
        progress = self.progress
        if self._iteration is not None:
            self._iteration.restore()
        if progress.record is not None:
            # Some ranks may have evaluated this step already; all evaluate it now.
            progress.evaluations = evaluations_before(progress.evaluations, progress.step)
            self._call_back(progress.record)
        while not self.ending:
            yield from self._one_step()
            if self._requests.membership_changed and not self.ending:
                raise MembershipChanged

    def _one_step(self) -> Iterator[Step]:
        """Yield a step, and call the callbacks when its caller has finished with it."""
        self.refuse_collectives()
        step = Step(self, self.progress.step)
        if self._iteration is not None:
            step = self._iteration.begin(step)
        self.current = step
        self.seed(self.progress.batch, STEP_SEED)
        yield step
        self.current = None
        if self._iteration is not None:
            self._iteration.end()
        try:
            step.check()
        except StepDiscarded as discarded:
            if discarded.membership_changed:
                raise MembershipChanged from None
            self._loader.go_back(self.progress.samples)
            return  # the loop repeats the step
        if self.progress.spike is not None:
            raise SpikeRollback
        self._call_back(self.progress.record or {})

    def close(self) -> None:
        """Close the callbacks and the loader."""
        for callback in self._callbacks:
            callback.close()
        self._loader.close()

    def _call_back(self, record: StepRecord) -> None:
        record = dict(record)
        for callback in self._callbacks:
            self._heartbeat.beat(Activity.PREPARING)
            callback.on_step(self, record)
        self._warn_of_spike(record)
        self._check_finite()

    def refuse_collectives(self) -> None:
        """Refuse the collectives of a script's own loop outside the blocks of its steps."""
        if self._iteration is not None:
            comm.COLLECTIVES.refuse(OUTSIDE)

    def seed(self, batch: int, kind: int) -> None:
        """Seed what a script's own loop draws outside its micro-batches; the same on all ranks.

        Args:
            batch: number of the step's global batch.
            kind: STEP_SEED, BLOCK_SEED, UPDATE_SEED or AFTER_SEED.
        """
        if self._iteration is not None:
            seed_all(self._seed, batch, 0, kind)

    def seed_update(self, batch: int) -> None:
        """Seed what the optimizer of a script draws: the block may draw on some ranks only."""
        if self._iteration is not None and not self._iteration.script.has_elementwise_optimizer:
            self.seed(batch, UPDATE_SEED)

    def check_structure(self) -> None:
        """Raise UserError if a script's model has other layers or buffers than at its start."""
        if self._iteration is not None:
            self._iteration.check_structure()

    # --- called by Step -----------------------------------------------------

    def begin_step(self) -> None:
        """Begin the step, see TrainStep."""
        self._applied.check(self.progress.step)
        self._began = time.perf_counter()
        progress = self.progress
        flags = Flags(progress.step, progress.batch, self._interruptions.requests())
        self._step.begin(self._loader.next_step(flags.batch), self.assignment, flags)

    def train_step(self) -> None:
        """Run the passes with the task's loss."""
        self._step.train()

    def open_passes(self) -> RankPasses:
        """Return the passes for a caller that computes the losses."""
        if self._iteration is not None:
            self._iteration.enter()
        return self._step.passes()

    def exchange(self) -> None:
        """Exchange the gradients, after all passes of this rank."""
        facts = self._loader.end_step()
        if facts is not None and self.topology.world_size > 1:
            require_same_samples(facts, self.topology)
        self._step.exchange()

    def fail_step(self) -> None:
        """End a step whose passes or exchange have failed."""
        self._step.fail()

    def keep_for_repetition(self) -> None:
        """Keep the state, which the rest of a script's iteration may change."""
        if self._iteration is not None:
            self._iteration.keep()

    def end_step(self) -> None:
        """Update; `_advance` counts the step."""
        progress = self.progress
        config, rate = self.train.spike, self._learning_rate(progress.step)
        skips = progress.spikes_in_a_row < config.most_in_a_row
        limit = loss_limit(config, progress.losses) if skips else None
        result = self._step.end(rate, self._advance, limit)
        try:
            last = progress.step >= self.train.steps
            self._step.complete(progress.step, any(result.requests) or last)
        finally:
            # The step counts even if the other ranks' parameters did not arrive.
            progress.record = self._record(result, time.perf_counter() - self._began)

    def _advance(self, result: StepResult) -> None:
        """Count a step, at the moment the parameters change."""
        progress, update = self.progress, result.update
        if not update.applied:
            self._applied.skip()
        progress.step += 1
        self._loader.advance()
        self.result = {**result.values, "grad_norm": update.grad_norm}
        if self._iteration is not None:
            self._iteration.count()
        progress.samples += result.used.samples
        self._note_loss(result)
        nonfinite = not update.applied and not update.overflow and update.spike_limit is None
        progress.nonfinite_in_a_row = progress.nonfinite_in_a_row + 1 if nonfinite else 0
        progress.nonfinite += nonfinite
        # A stop request in the last step has no effect: the run is finished anyway.
        progress.preempted = result.requests.stop and progress.step < self.train.steps
        self._requests = result.requests
        progress.record = self._record(result, result.ready_at - self._began)
        if update.overflow and self.topology.rank == 0:
            logger.info(
                "step %d: the gradient overflows with a loss scale of %g; skipped on all ranks",
                progress.step,
                update.loss_scale,
            )

    def _note_loss(self, result: StepResult) -> None:
        """Add the loss of the step that was just counted to the window, or note the spike."""
        progress, config, loss = self.progress, self.train.spike, result.values["loss"]
        limit = result.update.spike_limit
        if limit is not None:
            progress.spikes += 1
            progress.spikes_in_a_row += 1
            # A script that wants this step to be the last one gets no further step.
            if config.action == "rollback" and not result.requests.finish:
                progress.spike = Spike(progress.step, loss, limit)._asdict()
        elif result.update.applied and config.enabled:
            before = progress.losses
            if progress.spikes_in_a_row and exceeds(loss, loss_limit(config, before)):
                before = []
                if self.topology.rank == 0:
                    logger.warning(
                        "step %d: loss %.4f after %d spikes in a row: applied as a new level of "
                        "the loss (train.spike)",
                        progress.step,
                        loss,
                        progress.spikes_in_a_row,
                    )
            # A new list: snapshots of the progress keep the old one.
            kept = [*before, loss] if math.isfinite(loss) else before
            progress.losses = kept[-config.window :]
            progress.spikes_in_a_row = 0

    def _record(self, result: StepResult, seconds: float) -> StepRecord:
        progress, size, update = self.progress, self._dataset_size, result.update
        return {
            "step": progress.step,
            "loss": result.values["loss"],
            "samples": progress.samples,
            "epoch": progress.samples / size if size else self._loader.passes,
            "lr": update.lr,
            "grad_norm": update.grad_norm,
            "world_size": self.topology.world_size,
            "step_seconds": seconds,
            "samples_per_second": result.used.samples / seconds,
            "time": time.time(),
            "claim": self._claim,
            **{name: value for name, value in result.values.items() if name != "loss"},
            **result.used.metrics(seconds),
            **({} if update.loss_scale is None else {"loss_scale": update.loss_scale}),
            **({} if update.applied else {"skipped": True}),
            **({} if update.spike_limit is None else {"spike": True}),
            **({"overflow": True} if update.overflow else {}),
        }

    def _warn_of_spike(self, record: StepRecord) -> None:
        if "spike" in record and self.topology.rank == 0:
            logger.warning(
                "step %d: loss %.4f is a spike (train.spike); skipped on all ranks (%d in a row)",
                record["step"],
                record["loss"],
                self.progress.spikes_in_a_row,
            )

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
