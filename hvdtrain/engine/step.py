"""One optimizer step over the global batch: forward and backward, gradient exchange, update.

TrainStep runs a step in this order:

1. Save the model's buffers, which forward passes change (SavedBuffers).
2. Run forward and backward for each micro-batch of this rank (accumulate.py, or pipeline.py for a
   pipeline). Before the last backward pass, or after it if earlier passes have not reached all
   parameters (and in a pipeline), send the control vector (one float64 all-reduce of loss, metrics
   and flags, see ControlVector), by which ranks agree on a stop, for example.
3. In the last backward pass, hooks of the exchange send each bucket of gradients when it is
   complete, compressed if configured (see hvdtrain/exchange/base.py for when).
4. Wait for the gradients of the global batch and for the control vector. In a step with replays
   (replay.py), compare the gradients of the replayed micro-batches. Scale the gradients by the
   weights of the loss (TrainStep.exchange). A script with its own loop may now change them.
5. Compare the loss with its limit (spikes.py). Compute the norm of the gradients, clip them
   (Update.prepare).
6. In an elastic run whose ranks hold shards, wait until every rank can apply the update
   (parallel/agreement.py).
7. Update parameters, optimizer state and progress without communication (TrainStep._commit).
8. With parallel.shard.stage 1, gather the parameters that other ranks updated (TrainStep.complete,
   which the loop calls). With local SGD, average the ranks' states if it is due (local_sgd.py).

If a rank is lost in 2 to 6, the step raises RankLostError and leaves the state as it was before the
step (local SGD: see below). An elastic run then continues in a new generation (process/session.py),
which repeats the step; any other run ends. If another rank passed the wait in 6 and applied the
update, this rank applies its deferred update (Agreement.catch_up). If a rank is lost in 8, the step
counts, and the next generation completes the parameters (zero_state.redistribute). With local SGD,
a rank lost in any of these returns all ranks to their last common state (KeepCommonState).

RankLostError is another name of Horovod's HorovodInternalError (runtime/collectives.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from hvdtrain.data.assignment import Assignment
from hvdtrain.data.buckets import BatchUsage, SampleBuckets
from hvdtrain.data.config import BatchConfig
from hvdtrain.data.loader import Batch
from hvdtrain.engine.accumulate import (
    Accumulate,
    Passes,
    RankPasses,
    StepTotals,
    Totals,
    means,
)
from hvdtrain.engine.replay import Replay
from hvdtrain.engine.spikes import exceeds
from hvdtrain.errors import EXIT_USER
from hvdtrain.exchange.base import Exchange
from hvdtrain.exchange.watch import AFTER_THE_BLOCK, BETWEEN_MICRO_BATCHES, GradientWatch
from hvdtrain.optim.loss_scale import LossScale
from hvdtrain.optim.optimizer import set_learning_rate
from hvdtrain.parallel.agreement import Agreement
from hvdtrain.parallel.zero import ShardedOptimizer
from hvdtrain.runtime.collectives import (
    AgreedError,
    RankLostError,
    begin_sum,
    completed,
    gather_json,
)
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.device import sent, widened
from hvdtrain.runtime.heartbeat import Activity
from hvdtrain.runtime.tensor_shards import local

_NEWS = 3  # place in a control vector, see ControlSums
_FROZEN = 1 << 20  # more than there are ranks


class Requests(NamedTuple):
    """What this rank requests for the end of a step; or what the ranks agree on: some rank does.

    Args:
        stop: the run ends with a checkpoint, because of a signal for example.
        membership_changed: the generation ends, because processes join or leave.
        finish: the run ends, because the script wants this step to be the last one.
    """

    stop: bool = False
    membership_changed: bool = False
    finish: bool = False


NO_REQUESTS = Requests()


@dataclass(frozen=True)
class Flags:
    """Step counter and requests of a rank, sent with a step.

    Args:
        step: steps done before this one.
        batch: number of the step's global batch in the run's order, from 0: `step`, unless the run
            has passed over batches, see spikes.py.
    """

    step: int
    batch: int = 0
    requests: Requests = NO_REQUESTS


@dataclass(frozen=True)
class StepResult:
    """Result of one step, identical on all ranks.

    Args:
        values: float64, "loss" and the task's metrics as means over the global batch
        requests: on which the ranks agree
        used: samples and tokens in the micro-batches of all ranks
        ready_at: time.perf_counter() when the update was prepared, before the wait for other ranks
    """

    values: dict[str, float]
    update: UpdateResult
    requests: Requests
    used: BatchUsage
    ready_at: float


class TrainStep:
    """Turn micro-batches into one update of the model, identical on every rank.

    A step that is skipped (its gradient was not finite, or its loss is a spike) leaves parameters,
    optimizer state and saved buffers (see SavedBuffers) bitwise identical to their values before
    the step, on every rank. So does a step that fails, on each rank that has not applied the
    update: with an Agreement, other ranks may have applied it. (For local SGD see LocalSgd.)

    Args:
        batch: sizes of a step and of a micro-batch.
        buckets: with batch.max_tokens, the assignment of samples to micro-batches.
        sharded: the optimizer, if each rank updates a shard of the parameters.
        agreement: set if no rank may apply an update before all ranks can.
        replay: compares gradients of micro-batches between ranks; None: never.
    """

    def __init__(
        self,
        passes: Passes,
        exchange: Exchange,
        update: Update,
        batch: BatchConfig,
        context: RankContext,
        buckets: SampleBuckets | None = None,
        sharded: ShardedOptimizer | None = None,
        agreement: Agreement | None = None,
        replay: Replay | None = None,
    ) -> None:
        self._replay = replay
        self._passes = passes
        self._exchange = exchange
        self._update = update
        self._batch = batch
        self._buckets = buckets
        self._sharded = sharded
        self._agreement = agreement
        self._context = context
        self._buffers = passes.buffers
        self._open: _OpenStep  # since `begin`
        self._watch: GradientWatch | None = None  # of a script, in its first step
        self._watched = False
        self._scripted = False  # the caller computes the losses
        self._compared = False  # the ranks' gradients, see _compare_gradients
        self._exposed = "comm_exposed" if context.mesh.world.size > 1 else "other"
        self._sizes = Sizes(
            len(passes.forward.names),
            len(exchange.trained.all_names),
            passes.statistics.numel,
            passes.exact,
        )

    def begin(self, batches: Iterator[Batch], assignment: Assignment, flags: Flags) -> None:
        """Begin a step, to which `passes` or `train` add gradients.

        `exchange` and `end` must follow, or `fail`.

        Args:
            batches: this rank's micro-batches, see Passes.
            assignment: the micro-batches assigned to this rank; may be empty.
            flags: sent to the other ranks in the control vector; `step` must be identical on all
                ranks.
        """
        timer = self._context.timer
        phase = timer.phase
        timer.enter("optimizer")
        if self._watch is not None:
            self._watch.require_unchanged(AFTER_THE_BLOCK)
            self._watch = None
        if self._agreement is not None:
            # If an update were pending here, no surviving rank applied it, so this step repeats it.
            self._agreement.forget()
        self._buffers.keep()
        self._update.clear()
        self._exchange.begin(len(assignment))
        if self._replay is not None:
            batches = self._replay.follow(batches, assignment, flags.batch)
        used = self._used(assignment, flags.batch)
        control = ControlVector(flags, used, self._sizes, self._context)
        self._open = _OpenStep(batches, assignment, flags, control, phase)

    def train(self) -> None:
        """Run the task's forward and backward passes."""
        step = self._open
        self._passes.train(step.batches, step.assignment, step.control.totals, self._send_control)

    def passes(self) -> RankPasses:
        """Return the passes of this step for a caller that computes the losses itself."""
        step, passes = self._open, self._passes
        assert isinstance(passes, Accumulate)
        self._scripted = True
        if not self._watched:  # a script does the same in each step
            self._watch, self._watched = GradientWatch(self._exchange), True
        return passes.begin(
            step.batches, step.assignment, step.control.totals, self._send_control, self._watch
        )

    def _send_control(self, complete: bool) -> None:
        """Send the control vector, once; if passes are not complete, unless they may matter."""
        step, trained = self._open, self._exchange.trained
        if step.control.sent:
            return
        # A task freezes parameters in its forward pass: a rank without micro-batches does not know
        # which are frozen.
        works = len(step.assignment) > 0
        frozen = trained.frozen() if works else [False] * len(trained.all_names)
        reached = self._exchange.reached()
        missed = [False] * len(frozen)
        if reached is not None and len(reached) < len(frozen):
            if not complete and len(reached) < frozen.count(False):
                return
            names = {trained.names[p] for p in reached}
            missed = [name not in names for name in trained.all_names]
            if not complete and any(m and not f for m, f in zip(missed, frozen, strict=True)):
                return
        changing = self._passes.changing
        step.control.send(missed, frozen, changing is not None and changing.news)

    def fail(self) -> None:
        """End a step whose passes or exchange have failed: restore what forward passes changed."""
        self._watch = None
        self._buffers.restore()
        self._context.timer.enter(self._open.phase)

    def exchange(self) -> None:
        """Exchange the gradients, after all passes of this rank.

        Afterwards each `parameter.grad` is the gradient of the mean loss over the global batch, or
        None if the parameter is frozen, or no pass of any rank has reached it. With local SGD it is
        the gradient of this rank's own mean.

        Raises:
            RankLostError: another rank is gone.
            AgreedError: the task's values cannot be averaged, see means, or its loss is a mean over
                micro-batches of different sizes.
            StepDiscarded: a rank computed a wrong gradient; the step will be repeated.
            RuntimeError: the ranks are at different steps, or part of the global batch is missing.
        """
        step = self._open
        if self._watch is not None:
            self._watch.require_unchanged(BETWEEN_MICRO_BATCHES)
        sums = self._reduce_gradients()
        self._context.timer.enter("optimizer")
        self._check(sums, step.flags)
        if self._replay is not None:
            self._replay.compare(step.flags.step)
        values = means(self._passes.forward.names, sums.rows, self._batch.micro_batches)
        everyone = self._context.mesh.world.size
        if any(sums.missed):
            self._exchange.trained.drop([ranks >= everyone for ranks in sums.missed])
        self._update.scale(self._passes.forward.gradient_scale(sums.loss_weight))
        step.exchanged = sums, values

    def end(
        self,
        lr: float | None,
        advance: Callable[[StepResult], None] = lambda result: None,
        loss_limit: float | None = None,
    ) -> StepResult:
        """Update the model with the gradients of the global batch, see `exchange`.

        Args:
            lr: learning rate; None: leave that of the optimizer.
            loss_limit: skip the step if its loss exceeds this limit or is NaN; None: no limit.
            advance: advances other state, such as Progress. It is called together with the
                parameter update, even if the update is deferred.

        Raises:
            RankLostError: another rank is gone.
        """
        step = self._open
        assert step.exchanged is not None
        sums, values = step.exchanged
        try:
            try:
                exceeded = loss_limit if exceeds(values["loss"], loss_limit) else None
                ready = self._update.prepare(lr, exceeded)
                self._compare_gradients(ready.grad_norm)
            except Exception:  # torch's collectives raise other errors than Horovod's
                self._buffers.restore()
                raise
            commit = partial(self._commit, ready, sums, values, advance, time.perf_counter())
            self._wait_for_all(step.flags.step + 1, ready, commit)
            result = commit()
            if self._watch is not None:
                self._watch.note()
            return result
        finally:
            self._context.timer.enter(step.phase)

    def _compare_gradients(self, norm: float) -> None:
        """Compare the ranks' gradients in a script's first step of a generation.

        Raises:
            AgreedError: the script has changed them differently on each rank.
        """
        if self._compared or self._passes.changing is None or not self._exchange.same_gradients:
            return
        self._compared = True
        norms = gather_json(norm, "gradients.compared")
        known = [one for one in norms if math.isfinite(one)]
        # Unlike CPUs round the norm of the same gradients differently.
        if len(known) not in (0, len(norms)) or min(known, default=0) < 0.999 * max(
            known, default=0
        ):
            listed = ", ".join(f"{one:g}" for one in norms)
            raise AgreedError(
                f"the norms of the ranks' gradients differ at the end of a block ({listed}): "
                "the block has changed p.grad differently on each rank. After the micro-batches "
                "p.grad is the gradient of the global batch: let all ranks do the same with it",
                EXIT_USER,
                rank=0,
            )

    def _reduce_gradients(self) -> ControlSums:
        """Exchange the gradients of all passes; return the sums over all ranks."""
        timer, heartbeat, step = self._context.timer, self._context.heartbeat, self._open
        if not len(step.assignment):
            self._send_control(complete=True)
        heartbeat.beat(Activity.WAITING)
        timer.enter(self._exposed)
        self._exchange.reduce()
        self._passes.finish()
        sums = step.control.receive()
        self._passes.statistics.apply(sums.statistics)
        if self._passes.changing is not None:
            topology = self._context.mesh.topology
            if sums.news:
                self._passes.changing.agree(topology)
            self._passes.changing.share(step.assignment.last, topology)
        heartbeat.beat(Activity.WORKING)
        return sums

    def _used(self, assignment: Assignment, batch: int) -> BatchUsage:
        """Samples and tokens of this rank's micro-batches; zero if another rank counts them."""
        if not self._context.mesh.leads:
            return BatchUsage(0)
        if self._buckets is None:
            return BatchUsage(len(assignment) * self._batch.micro_samples)
        return self._buckets.used(batch * self._batch.micro_batches + j for j in assignment)

    def _check(self, sums: ControlSums, flags: Flags) -> None:
        """Raise RuntimeError unless all ranks did the same step and used the whole global batch."""
        step, ranks, samples = flags.step, self._context.mesh.world.size, self._batch.global_size
        if self._buckets is not None:
            samples = self._buckets.samples_of(flags.batch, self._batch.micro_batches)
        if sums.steps != step * ranks or sums.used.samples != samples:
            raise RuntimeError(
                f"step {step + 1}: ranks disagree: sum of steps {sums.steps:.0f} (expected "
                f"{step * ranks}), samples {sums.used.samples} (expected {samples})"
            )
        if self._scripted and any(sums.missed):
            self._check_frozen(sums, step)
        if self._buckets is not None and not sums.loss_pairs:
            raise AgreedError(
                "batch.max_tokens makes micro-batches of different sizes, whose mean losses cannot "
                "be averaged: step.backward, or a task's loss(), gives the loss as (sum, number of "
                "tokens)",
                EXIT_USER,
                rank=0,
            )

    def _check_frozen(self, sums: ControlSums, step: int) -> None:
        """Raise AgreedError if a parameter is frozen on some ranks only."""
        working = sum(count > 0 for count in self._open.assignment.counts)
        for name, ranks in zip(self._exchange.trained.all_names, sums.frozen, strict=True):
            if 0 < ranks < working:
                raise AgreedError(
                    f"step {step + 1}: the model's parameter {name} is frozen on {ranks} of "
                    f"{working} ranks: freeze and unfreeze parameters in the same step on all "
                    "ranks, for example by the step's index",
                    EXIT_USER,
                    rank=0,
                )

    def _wait_for_all(
        self, step: int, ready: ReadyUpdate, commit: Callable[[], StepResult]
    ) -> None:
        """Wait until all ranks can apply the update; without an agreement, return at once.

        Args:
            step: number of steps done after this one.
            commit: applies the update; called here only if it is deferred. Otherwise the caller
                calls it after the wait.

        Raises:
            RankLostError: another rank is gone; the update is deferred: `agreement` can apply it.
        """
        if self._agreement is None:
            return

        def apply_deferred() -> None:
            self._buffers.swap()  # back to the values of the forward passes, see below
            self._update.restore_gradients(ready)
            commit()
            self._update.clear()

        try:
            with self._context.timer.inside("comm_exposed"):
                self._agreement.wait(step, apply_deferred)
        except RankLostError:
            # The forward passes have changed the buffers. Restore their values before the step, and
            # keep the changed ones, which `apply_deferred` needs.
            self._buffers.swap()
            raise

    def _commit(
        self,
        ready: ReadyUpdate,
        sums: ControlSums,
        values: dict[str, float],
        advance: Callable[[StepResult], None],
        ready_at: float,
    ) -> StepResult:
        """Move all state of this rank from before the step to after it, without communication."""
        updated = self._update.commit(ready)
        if not updated.applied:
            self._buffers.restore()
            if self._sharded is not None:
                self._sharded.skip()
        self._exchange.commit(updated.applied)
        result = StepResult(values, updated, sums.requests, sums.used, ready_at)
        advance(result)
        return result

    def due(self, step: int, every: int) -> bool:
        """See Exchange."""
        return self._exchange.due(step, every)

    def complete(self, step: int, pauses: bool) -> None:
        """After a counted step, give every rank what other ranks have updated, see Exchange.

        Raises:
            RankLostError: another rank is gone; this rank's parameters are already updated.
        """
        if self._sharded is not None:
            with self._context.timer.inside(self._exposed):
                self._sharded.gather()
        if self._exchange.must_average(step, pauses):
            with self._context.timer.inside(self._exposed):
                self._exchange.average()


@dataclass
class _OpenStep:
    """A step that has begun.

    Args:
        phase: the timer's phase before the step.
        exchanged: sums over all ranks, and the means of the loss and the metrics; None before the
            exchange.
    """

    batches: Iterator[Batch]
    assignment: Assignment
    flags: Flags
    control: ControlVector
    phase: str
    exchanged: tuple[ControlSums, dict[str, float]] | None = None


@dataclass(frozen=True)
class Sizes:
    """Lengths of the sections of a control vector, identical on all ranks.

    Args:
        values: the loss and the metrics.
        parameters: exchanged parameters.
        statistics: elements of BatchNorm's running statistics.
        exact: values and statistics are summed without rounding, see Totals.
    """

    values: int
    parameters: int
    statistics: int
    exact: bool = False


@dataclass(frozen=True)
class ControlSums:
    """Content of a control vector, summed over all ranks.

    Args:
        requests: of any rank.
        news: number of ranks that want to agree on the buffers that change.
        steps: sum of the ranks' `step`.
        used: samples and tokens of all ranks' micro-batches.
        rows: rows of the loss and the metrics, 3 rows as returned by `accumulate.rows_of`.
        missed: for each parameter, the number of ranks whose passes have not reached it, plus
            _FROZEN for each rank that has frozen it.
        statistics: summed changes of the running statistics; on the device.
    """

    requests: Requests
    news: float
    steps: float
    used: BatchUsage
    rows: list[list[float]]
    missed: list[float]
    statistics: Tensor

    @property
    def frozen(self) -> list[int]:
        """For each parameter, how many ranks have frozen it."""
        return [int(count // _FROZEN) for count in self.missed]

    @property
    def loss_weight(self) -> float:
        """Sum of the weights of the loss; 0 if the task gives the loss as a mean."""
        return self.rows[1][0]

    @property
    def loss_pairs(self) -> float:
        """Number of micro-batches whose loss was given as (sum, weight)."""
        return self.rows[2][0]


class ControlVector:
    """Float64 vector of one step, summed over all ranks.

    If it is sent before the last backward pass, it overlaps with it.

    Args:
        used: samples and tokens of this rank's micro-batches.

    Attributes:
        totals: add to these before `send`.
        sent: the all-reduce has begun.
    """

    def __init__(self, flags: Flags, used: BatchUsage, sizes: Sizes, context: RankContext) -> None:
        head = [*flags.requests, False, flags.step, *used]
        parts = Totals.number_of_parts(sizes.exact)
        numbers = 3 * sizes.values + sizes.statistics
        self._head, self._before_totals = len(head), len(head) + sizes.parameters
        vector = np.zeros(self._before_totals + parts * numbers)  # float64
        vector[: self._head] = head
        self._vector = sent(torch.from_numpy(vector), context.device)
        totals = self._vector[self._before_totals :].view(parts, numbers)
        values = totals[:, : 3 * sizes.values].view(parts, 3, sizes.values)
        self.totals = StepTotals(Totals(values), Totals(totals[:, 3 * sizes.values :]))
        self._alone = context.mesh.world.size == 1
        self._handle: int | None = None
        self.sent = False

    def send(
        self, missed: Sequence[bool] = (), frozen: Sequence[bool] = (), news: bool = False
    ) -> None:
        """Begin the all-reduce; `totals` must be complete.

        Args:
            missed: for each parameter, whether no pass of this rank has reached it.
            frozen: for each parameter, whether it is frozen.
            news: see ControlSums.
        """
        self.sent = True
        if news:
            self._vector[_NEWS] = 1.0
        if any(missed) or any(frozen):
            counts = [m + _FROZEN * f for m, f in zip(missed, frozen, strict=True)]
            own = torch.tensor(counts, dtype=torch.float64)
            place = self._vector[self._head : self._before_totals]
            place.copy_(sent(own, place.device))
        if not self._alone:
            self._handle = begin_sum(self._vector, "control")

    def receive(self) -> ControlSums:
        """Wait for the all-reduce and return the sums.

        Raises:
            RankLostError: another rank is gone.
        """
        if self._handle is not None:
            completed(self._handle)
        values = self.totals.values.value()
        vector = torch.cat([self._vector[: self._before_totals], values.flatten()])
        numbers = vector.tolist()  # the step's first wait for the device
        *requests, news, steps = numbers[: _NEWS + 2]
        used = BatchUsage(*map(int, numbers[_NEWS + 2 : self._head]))
        missed, width = numbers[self._head : self._before_totals], values.shape[1]
        rows = [numbers[at : at + width] for at in range(self._before_totals, len(numbers), width)]
        statistics = self.totals.statistics.value()
        agreed = Requests(*(ranks > 0 for ranks in requests))
        return ControlSums(agreed, news, steps, used, rows, missed, statistics)


@dataclass(frozen=True)
class ReadyUpdate:
    """Prepared update; what remains needs no communication.

    Args:
        grad_norm: see UpdateResult
        finite: whether the norm is finite
        spike_limit: the limit that the loss exceeded; None also if the norm is not finite
        gradients: clipped gradient of each parameter
    """

    grad_norm: float
    finite: bool
    spike_limit: float | None
    gradients: list[Tensor | None]

    @property
    def applied(self) -> bool:
        """Whether the commit will change parameters."""
        return self.finite and self.spike_limit is None


@dataclass(frozen=True)
class UpdateResult:
    """Result of an update.

    Args:
        grad_norm: gradient norm of the global batch, before clipping; with local SGD the root mean
            square of the ranks' gradient norms, see Exchange.agreed_norm
        applied: False if the norm was not finite or the loss a spike: parameters and optimizer
            state are unchanged
        spike_limit: see ReadyUpdate
        lr: learning rate, of the first group
        loss_scale: loss scale of this step's loss, with fp16
        overflow: the gradient was not finite, and the loss scale may be too high
    """

    grad_norm: float
    applied: bool
    spike_limit: float | None
    lr: float
    loss_scale: float | None = None
    overflow: bool = False


class Update:
    """Scale the gradients, check that they are finite, clip them, and step.

    `prepare` may communicate; it changes gradients and sets the learning rate. `commit` changes the
    parameters and the optimizer's state, without communication.

    Args:
        optimizer: over the parameters of `exchange`.
        exchange: has exchanged the gradients when `scale` is called.
        clip_norm: gradients are scaled down to this norm; 0 = never.
        loss_scale: adjusted after each step according to whether the gradients were finite.
        total_norm: norm of the gradients of the given parameters; for a model that spans ranks,
            over all its shards.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        exchange: Exchange,
        clip_norm: float,
        loss_scale: LossScale | None = None,
        total_norm: Callable[[Sequence[Tensor]], Tensor] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._exchange = exchange
        self._clip_norm = clip_norm
        self._loss_scale = loss_scale
        self._total_norm = total_norm or norm_of_gradients
        self._lr: float | None = None
        self._unclipped: Tensor | None = None  # with a loss scale: norm before a script's changes

    def clear(self) -> None:
        """Drop the gradients of the previous step."""
        self._optimizer.zero_grad()

    def scale(self, factor: float) -> None:
        """Multiply the gradients by `factor`."""
        # torch._foreach_* (one kernel for all gradients) are private, without a public equivalent.
        # If torch removes them, each step fails; tests/single/test_torch_private.py detects it.
        if factor != 1.0:
            torch._foreach_mul_(self._gradients(), factor)
        if self._loss_scale is not None:
            # A script may clamp infinite gradients before `prepare`.
            self._unclipped = self._total_norm(
                [p for p in self._exchange.parameters if p.grad is not None]
            )

    def _gradients(self) -> list[Tensor]:
        return [local(p.grad) for p in self._exchange.parameters if p.grad is not None]

    def prepare(self, lr: float | None, spike_limit: float | None = None) -> ReadyUpdate:
        """Check and clip the gradients; parameters and optimizer state stay unchanged.

        All ranks make the same decision: every rank holds the bitwise identical gradient, or (with
        local SGD, and if a model spans ranks) its own gradient and a bitwise identical norm.

        Args:
            lr: base learning rate; a group with an lr_scale uses lr * lr_scale. None: leave the
                optimizer's.
            spike_limit: the limit that the loss exceeded: the step will be skipped.

        Raises:
            RankLostError: another rank is gone.
        """
        self._lr = lr
        parameters = self._exchange.parameters
        norm = self._total_norm([p for p in parameters if p.grad is not None])
        if self._unclipped is not None:
            norm = norm + 0.0 * self._unclipped  # NaN if that is not finite
        common = self._exchange.agreed_norm(norm)
        grad_norm = float(common)  # the step's second and last wait for the device
        finite = math.isfinite(grad_norm)
        if finite and spike_limit is None:
            if self._clip_norm > 0:
                # With local SGD, by the norm of this rank.
                _clip(self._gradients(), self._clip_norm, norm)
            if lr is not None:
                set_learning_rate(self._optimizer, lr)
        limit = spike_limit if finite else None
        return ReadyUpdate(grad_norm, finite, limit, [p.grad for p in parameters])

    def commit(self, ready: ReadyUpdate) -> UpdateResult:
        """Update the parameters, unless the step is skipped; needs no communication."""
        if ready.applied:
            self._optimizer.step()
        # An optimizer may have no rate.
        group = self._optimizer.param_groups[0]
        lr = self._lr if self._lr is not None else float(group.get("lr", math.nan))
        result = UpdateResult(ready.grad_norm, ready.applied, ready.spike_limit, lr)
        if self._loss_scale is None:
            return result
        scale, overflow = self._loss_scale.value, self._loss_scale.update(ready.finite)
        return replace(result, loss_scale=scale, overflow=overflow)

    def restore_gradients(self, ready: ReadyUpdate) -> None:
        """Restore the gradients of a deferred update."""
        for parameter, gradient in zip(self._exchange.parameters, ready.gradients, strict=True):
            parameter.grad = gradient


@torch.no_grad()  # a script may have computed gradients with a graph
def norm_of_gradients(parameters: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of the gradients of a model that this rank holds completely."""
    # A norm in 16 bits has only two or three digits.
    gradients = [widened(p.grad) for p in parameters if p.grad is not None]
    if len({(one.device, one.dtype) for one in gradients}) != 1:
        return get_total_norm(gradients)
    # The same, without its sorting by device and type, which takes longer for a small model.
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def _clip(gradients: Sequence[Tensor], most: float, norm: Tensor) -> None:
    """Clip as torch.nn.utils.clip_grads_with_norm_ does, also shards of gradients."""
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, there in by_device.items():
        torch._foreach_mul_(there, factor.to(device))


class AppliedSteps:
    """Number of steps that this rank's tensors have been through.

    It is counted when an update is applied or skipped. The count is sent with the tensors, and
    `Progress.step` with the progress: if they differ, a step was applied twice or omitted.

    Args:
        optimizer: steps on the tensors.

    Attributes:
        count: steps, including skipped ones.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.count = 0
        optimizer.register_step_post_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1

    def skip(self) -> None:
        """Count a step that changes no tensor."""
        self.count += 1

    def check(self, step: int) -> None:
        """Raise RuntimeError unless the tensors have been through `step` steps."""
        if self.count != step:
            raise RuntimeError(
                f"the run is at step {step}, but {self.count} steps were applied to the parameters "
                "of this rank: a step was applied twice or omitted"
            )
