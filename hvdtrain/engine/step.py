"""One optimizer step over the global batch: passes, exchange, update, in this order.

TrainStep defines the order; Update turns the exchanged gradients into the next parameters. The
forward and backward passes are in accumulate.py and pipeline.py, the numbers that all ranks sum in
control.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from hvdtrain.data.buckets import SampleBuckets, Used
from hvdtrain.data.config import BatchConfig
from hvdtrain.data.deal import Deal
from hvdtrain.data.loader import Batch
from hvdtrain.engine.accumulate import Passes
from hvdtrain.engine.control import Agreed, ControlVector, Flags, Sizes, means
from hvdtrain.errors import EXIT_USER
from hvdtrain.exchange.base import Exchange
from hvdtrain.optim.loss_scale import LossScale
from hvdtrain.optim.optimizer import set_learning_rate
from hvdtrain.parallel.agreement import Agreement
from hvdtrain.parallel.zero import ShardedOptimizer
from hvdtrain.runtime.collectives import AgreedError, RankLostError
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.heartbeat import Activity
from hvdtrain.runtime.parts import local


@dataclass(frozen=True)
class StepResult:
    """What one step gave, alike on all ranks.

    Args:
        values: float64, "loss" and the task's metrics as means over the global batch
        grad_norm: norm of the gradient of the global batch, before clipping; of ranks that step on
            their own the root mean square of those of theirs
        applied: False where the gradient was not finite and the step was skipped
        loss_scale, overflow: see UpdateResult
        stop: some rank was asked to stop
        membership_changed: some rank has heard that processes join or leave
        used: what the micro-batches of all ranks held
        ready_at: time.perf_counter() when all but the update was done
    """

    values: dict[str, float]
    grad_norm: float
    applied: bool
    loss_scale: float | None
    overflow: bool
    stop: bool
    membership_changed: bool
    used: Used
    ready_at: float


class TrainStep:
    """Micro-batches to an update of the model, the same on every rank.

    A step that is skipped (its gradient was not finite) or that fails leaves nothing behind:
    parameters, the optimizer's state and the saved buffers (see SavedBuffers for what these are)
    have the bits that they had before, on every rank. Where ranks step on their own, one that fails
    may leave some of it behind; Snapshot has the state to go back to.

    Args:
        batch: samples of a step and of a micro-batch.
        buckets: with batch.max_tokens, what micro-batches hold.
        sharded: the optimizer, where it updates a part of the parameters.
        agreement: if a rank must not take a step before all ranks can.
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
    ) -> None:
        self._passes = passes
        self._exchange = exchange
        self._update = update
        self._batch = batch
        self._buckets = buckets
        self._sharded = sharded
        self._agreement = agreement
        self._context = context
        self._buffers = passes.buffers
        self._exposed = "comm_exposed" if context.mesh.world.size > 1 else "other"
        self._sizes = Sizes(
            len(passes.forward.names), len(exchange.frozen()), passes.statistics.numel, passes.exact
        )

    @property
    def synchronised(self) -> bool:
        """All ranks hold the same state."""
        return self._exchange.synchronised

    def __call__(
        self,
        batches: Iterator[Batch],
        deal: Deal,
        lr: float,
        flags: Flags,
        advance: Callable[[StepResult], None] = lambda result: None,
    ) -> StepResult:
        """Runs one step.

        Args:
            batches: this rank's micro-batches, see Passes.
            deal: how many these are; may be 0.
            lr: learning rate.
            flags: sent to the other ranks in the control vector; `step` must be alike on all.
            advance: advances what else belongs to the state, such as Progress. It is called
                together with the update of the parameters, even if that happens late.

        Raises:
            RankLostError: another rank is gone.
            AgreedError: the task's values cannot be averaged, see means, or its loss is a mean
                over micro-batches of different sizes.
            RuntimeError: the ranks are at different steps, or lack a part of the global batch.
        """
        timer = self._context.timer
        timer.enter("optimizer")
        if self._agreement is not None:
            self._agreement.forget()
        self._buffers.keep()
        try:
            agreed = self._exchanged(batches, deal, flags)
        except Exception:  # torch's collectives raise other errors than Horovod's
            self._buffers.restore()
            raise
        finally:
            timer.enter("other")
        self._check(agreed, flags.step)
        values = means(self._passes.forward.names, agreed.sums, self._batch.micro_batches)
        self._exchange.rest([ranks > 0 for ranks in agreed.frozen])
        with timer.inside("optimizer"):
            scale = self._passes.forward.gradient_scale(agreed.sums[1][0])
            ready = self._ready(lr, scale)
            commit = partial(self._commit, ready, agreed, values, advance, time.perf_counter())
            self._wait_for_all(flags.step + 1, ready, commit)
            result = commit()
        pauses = agreed.stops > 0 or agreed.changes > 0
        if not self.synchronised and (pauses or flags.synchronise):
            with timer.inside(self._exposed):
                self._exchange.synchronise()
        return result

    def _ready(self, lr: float, gradient_scale: float) -> ReadyUpdate:
        try:
            return self._update.prepare(lr, gradient_scale)
        except Exception:
            self._buffers.restore()
            raise

    def _wait_for_all(
        self, step: int, ready: ReadyUpdate, commit: Callable[[], StepResult]
    ) -> None:
        """Waits until all ranks can take the step.

        Raises:
            RankLostError: another rank is gone; `agreement` can take the step late.
        """
        if self._agreement is None:
            return

        def take_late() -> None:
            self._buffers.swap()
            self._update.restore_gradients(ready)
            commit()
            self._update.clear()

        try:
            with self._context.timer.inside("comm_exposed"):
                self._agreement(step, take_late)
        except RankLostError:
            self._buffers.swap()
            raise

    def _commit(
        self,
        ready: ReadyUpdate,
        agreed: Agreed,
        values: dict[str, float],
        advance: Callable[[StepResult], None],
        ready_at: float,
    ) -> StepResult:
        """Moves all of this rank's state from before the step to after it; needs no other rank."""
        updated = self._update.commit(ready)
        if not updated.applied:
            self._buffers.restore()
            if self._sharded is not None:
                self._sharded.skip()
        self._exchange.commit(updated.applied)
        result = StepResult(
            values=values,
            grad_norm=updated.grad_norm,
            applied=updated.applied,
            loss_scale=updated.loss_scale,
            overflow=updated.overflow,
            stop=agreed.stops > 0,
            membership_changed=agreed.changes > 0,
            used=agreed.used,
            ready_at=ready_at,
        )
        advance(result)
        return result

    def complete(self) -> None:
        """After a step that counts: every rank gets the parameters that others have updated.

        Raises:
            RankLostError: another rank is gone; this rank's part is that of after the step.
        """
        if self._sharded is not None:
            with self._context.timer.inside(self._exposed):
                self._sharded.gather()

    def _exchanged(self, batches: Iterator[Batch], deal: Deal, flags: Flags) -> Agreed:
        """The gradients are those to step with then; returns what the ranks agreed on."""
        timer, heartbeat = self._context.timer, self._context.heartbeat
        self._update.clear()
        self._exchange.begin(len(deal))
        control = ControlVector(flags, self._used(deal, flags.step), self._sizes, self._context)

        def send() -> None:
            # A task freezes parameters in its forward pass; without one, none is known to be.
            control.send(self._exchange.frozen() if len(deal) else ())

        self._passes.train(batches, deal, control, before_last=send)
        if not len(deal):
            send()
        heartbeat.beat(Activity.WAITING)
        timer.enter(self._exposed)
        self._exchange.finish()
        self._passes.finish()
        agreed = control.receive()
        self._passes.statistics.apply(agreed.statistics)
        heartbeat.beat(Activity.WORKING)
        return agreed

    def _used(self, deal: Deal, step: int) -> Used:
        """What the micro-batches of this rank hold; nothing where another rank counts them."""
        if not self._context.mesh.leads:
            return Used(0)
        if self._buckets is None:
            return Used(len(deal) * self._batch.micro_size)
        return self._buckets.used(step * self._batch.micro_batches + j for j in deal)

    def _check(self, agreed: Agreed, step: int) -> None:
        """Raises RuntimeError unless all ranks did the same step, and all of it."""
        ranks, samples = self._context.mesh.world.size, self._batch.global_size
        if self._buckets is not None:
            samples = self._buckets.samples_of(step, self._batch.micro_batches)
        if agreed.steps != step * ranks or agreed.used.samples != samples:
            raise RuntimeError(
                f"step {step + 1}: the ranks together are at {agreed.steps:.0f} steps and used "
                f"{agreed.used.samples} samples"
            )
        if self._buckets is not None and not agreed.sums[2][0]:
            raise AgreedError(
                "batch.max_tokens makes micro-batches of different sizes, whose mean losses cannot "
                "be averaged: the task's loss() must return the loss as (sum, number of tokens)",
                EXIT_USER,
                rank=0,
            )


@dataclass(frozen=True)
class ReadyUpdate:
    """An update of which only this rank's own part is left to do.

    Args:
        grad_norm, applied: see UpdateResult
        gradients: of each parameter, clipped
    """

    grad_norm: float
    applied: bool
    gradients: list[Tensor | None]


@dataclass(frozen=True)
class UpdateResult:
    """What an update did.

    Args:
        grad_norm: norm of the gradient before clipping, see Exchange.agreed_norm
        applied: False where it was not finite: parameters and optimizer are what they were
        loss_scale: with which it was computed, of fp16
        overflow: it was not finite, and the loss scale could be too high
    """

    grad_norm: float
    applied: bool
    loss_scale: float | None = None
    overflow: bool = False


class Update:
    """Scales the gradients, checks that they are finite, clips them, and steps.

    Args:
        optimizer: over the parameters of `exchange`.
        exchange: has exchanged the gradients when `prepare` is called.
        clip_norm: gradients are scaled down to this norm; 0 = never.
        loss_scale: follows from whether gradients are finite.
        total_norm: of the gradients of parameters; of a model that spans ranks, of all its parts.
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

    def clear(self) -> None:
        """Takes away the gradients of the step before."""
        self._optimizer.zero_grad()

    def prepare(self, lr: float, gradient_scale: float) -> ReadyUpdate:
        """Scales, checks and clips the gradients; parameters and optimizer stay as they are.

        Every rank holds the same bits of the gradient, or those of its own and the same bits of a
        norm over all ranks; so all decide alike.

        Args:
            lr: learning rate, of groups without an lr_scale.
            gradient_scale: what gradients are multiplied with first.

        Raises:
            HorovodInternalError: another rank is gone.
        """
        parameters = self._exchange.parameters
        own = [local(p.grad) for p in parameters if p.grad is not None]
        # torch._foreach_* are private, but have no public equivalent: one kernel for all gradients.
        # If they go, each step fails; tests/single/test_torch_private.py notices.
        if gradient_scale != 1.0:
            torch._foreach_mul_(own, gradient_scale)
        norm = self._total_norm([p for p in parameters if p.grad is not None])
        agreed = self._exchange.agreed_norm(norm)
        applied = bool(torch.isfinite(agreed))
        if applied:
            if self._clip_norm > 0:
                _clip(own, self._clip_norm, norm)
            set_learning_rate(self._optimizer, lr)
        return ReadyUpdate(float(agreed), applied, [p.grad for p in parameters])

    def commit(self, ready: ReadyUpdate) -> UpdateResult:
        """Updates the parameters, unless the gradient is not finite; needs no other rank."""
        if ready.applied:
            self._optimizer.step()
        if self._loss_scale is None:
            return UpdateResult(ready.grad_norm, ready.applied)
        used, overflow = self._loss_scale.value, self._loss_scale.update(ready.applied)
        return UpdateResult(ready.grad_norm, ready.applied, used, overflow)

    def restore_gradients(self, ready: ReadyUpdate) -> None:
        """Gives the parameters the gradients of an update that is committed late."""
        for parameter, gradient in zip(self._exchange.parameters, ready.gradients, strict=True):
            parameter.grad = gradient


def norm_of_gradients(parameters: Sequence[Tensor]) -> Tensor:
    """The 2-norm of the gradients of a model that this rank has whole."""
    return get_total_norm([_wide(p.grad) for p in parameters if p.grad is not None])


def _clip(gradients: Sequence[Tensor], most: float, norm: Tensor) -> None:
    """torch.nn.utils.clip_grads_with_norm_, for parts of gradients too."""
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, there in by_device.items():
        torch._foreach_mul_(there, factor.to(device))


def _wide(gradient: Tensor) -> Tensor:
    """A norm of 16 bits would have two or three digits."""
    return gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient


class AppliedSteps:
    """Steps that the tensors of this rank have been through, counted where they change.

    The count is sent with the tensors and `Progress.step` with the progress: if they differ, a step
    was applied twice or left out.

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
        """Count a step that changes no tensor: its gradient was not finite."""
        self.count += 1

    def check(self, step: int) -> None:
        """Raise RuntimeError unless the tensors have been through `step` steps."""
        if self.count != step:
            raise RuntimeError(
                f"the run is at step {step}, but {self.count} steps were applied to the parameters "
                "of this rank: a step was applied twice or left out"
            )
