"""The mathematics of one optimizer step over the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hvdtrain.data.loader import Batch, to_device
from hvdtrain.engine.buffers import SavedBuffers
from hvdtrain.exchange.dense import GradientExchange
from hvdtrain.runtime.heartbeat import Activity, Heartbeat
from hvdtrain.runtime.phases import PhaseTimer
from hvdtrain.tasks import Task, optional


@dataclass(frozen=True)
class StepResult:
    """What one step gave, alike on all ranks.

    Args:
        values: float64, "loss" and the task's metrics as means over the global batch
        grad_norm: norm of the gradient of the global batch, before clipping
        applied: False where the gradient was not finite and the step was skipped
        stop: some rank was asked to stop
        membership_changed: some rank has heard that processes join or leave
    """

    values: dict[str, float]
    grad_norm: float
    applied: bool
    stop: bool
    membership_changed: bool


class TrainStep:
    """Micro-batches to an update of the model, the same on every rank.

    The loss of each micro-batch is divided by the number of micro-batches in the global
    batch, so that the sum over passes and ranks is the gradient of the mean.

    Args:
        task, model, exchange: what is trained, and how gradients become one.
        micro_batches: in one step, over all ranks together.
        clip_norm: gradients are scaled down to this norm; 0 = never.
        device: where the model is.
        heartbeat: notified of each micro-batch.
        timer: notified of each phase.

    A step that is skipped (its gradient was not finite) or that fails leaves nothing behind:
    parameters, the optimizer's state and the saved buffers (see SavedBuffers for what these are)
    have the bits that they had before, on every rank.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        exchange: GradientExchange,
        *,
        micro_batches: int,
        micro_size: int,
        clip_norm: float,
        device: torch.device,
        heartbeat: Heartbeat,
        timer: PhaseTimer,
    ) -> None:
        self._task = task
        self._model = model
        self._exchange = exchange
        self._micro_batches = micro_batches
        self._clip_norm = clip_norm
        self._micro_size = micro_size
        self._device = device
        self._heartbeat = heartbeat
        self._timer = timer
        self._names = ("loss", *optional(task, "metrics"))
        self._buffers = SavedBuffers(model)

    def __call__(
        self,
        batches: Iterator[Batch],
        passes: int,
        lr: float,
        *,
        step: int,
        stop: bool,
        membership_changed: bool,
    ) -> StepResult:
        """Runs one step. After an error the model and the optimizer are what they were before.

        Args:
            batches: this rank's micro-batches; the random numbers that a forward pass draws
                follow from the seeding that goes with each.
            passes: how many these are; may be 0.
            lr: learning rate.
            step: steps done before this one; must be alike on all ranks.
            stop, membership_changed: sent to the other ranks in the control vector.

        Raises:
            HorovodInternalError: another rank is gone.
            RuntimeError: the ranks are at different steps, or lack a part of the global batch.
        """
        self._timer.enter("optimizer")
        self._buffers.keep()
        try:
            control = self._exchanged(batches, passes, lr, [stop, membership_changed, step])
        except HorovodInternalError:
            self._buffers.restore()
            raise
        finally:
            self._timer.enter("other")
        stops, changes, steps, samples = control[:4]
        values, frozen = control[4 : 4 + len(self._names)], control[4 + len(self._names) :]
        if steps != step * hvd.size() or samples != self._micro_batches * self._micro_size:
            raise RuntimeError(
                f"step {step + 1}: the ranks together are at {steps:.0f} steps and used "
                f"{samples:.0f} samples"
            )
        self._exchange.rest([count > 0 for count in frozen])
        with self._timer.inside("optimizer"):
            grad_norm, applied = self._update()
        named = dict(zip(self._names, values, strict=True))
        return StepResult(named, grad_norm, applied, stops > 0, changes > 0)

    def _exchanged(
        self, batches: Iterator[Batch], passes: int, lr: float, flags: list[float]
    ) -> list[float]:
        """The gradients are the sum over all ranks then; returns the sums of
        [*flags, samples, loss, metrics ..., of each parameter how many ranks have frozen it]."""
        optimizer = self._exchange.optimizer
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = lr
        self._exchange.begin(passes)
        # One vector for all that travels beside gradients.
        head = [*map(float, flags), float(passes * self._micro_size)]
        empty = [0.0] * (len(self._names) + len(self._exchange.parameters))
        control = torch.tensor(head + empty, dtype=torch.float64).to(self._device)
        summed = control[len(head) : len(head) + len(self._names)]
        handle = None
        self._heartbeat.beat(Activity.WORKING)
        enter = self._timer.enter
        enter("data")
        for done, batch in enumerate(batches, start=1):
            on_device = to_device(batch, self._device)
            enter("forward")
            losses = self._task.loss(self._model, on_device)
            means = torch.stack([losses[n].detach() for n in self._names])
            summed += means / self._micro_batches
            if done == passes:
                # Only here: a rank without micro-batches has not heard the task.
                frozen = self._exchange.frozen()
                if any(frozen):
                    control[-len(frozen) :] = torch.tensor(frozen)
                handle = self._send(control)  # travels during the last backward pass
            enter("backward")
            (losses["loss"] / self._micro_batches).backward()
            enter("data")
            self._heartbeat.beat(Activity.WORKING)
        if passes == 0:
            handle = self._send(control)
        self._heartbeat.beat(Activity.WAITING)
        enter("comm_exposed" if hvd.size() > 1 else "other")
        self._exchange.finish()
        if handle is not None:
            hvd.synchronize(handle)
        self._heartbeat.beat(Activity.WORKING)
        return control.tolist()

    def _send(self, control: Tensor) -> int | None:
        if hvd.size() == 1:
            return None
        return hvd.allreduce_async_(control, op=hvd.Sum, name="control")

    def _update(self) -> tuple[float, bool]:
        """Clips and steps unless the gradient is not finite; (norm, whether it stepped).

        Every rank holds the same bits of the gradient, so all decide alike.
        """
        parameters = self._exchange.parameters
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = get_total_norm(gradients)
        applied = bool(torch.isfinite(norm))
        if applied:
            if self._clip_norm > 0:
                clip_grads_with_norm_(parameters, self._clip_norm, norm)
            with self._exchange.ready():
                self._exchange.optimizer.step()
        else:
            self._buffers.restore()
        return float(norm), applied
