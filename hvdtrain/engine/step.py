"""The mathematics of one optimizer step over the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hvdtrain.data.loader import Batch, to_device
from hvdtrain.optim.exchange import GradientExchange
from hvdtrain.tasks import Task, optional


@dataclass(frozen=True)
class StepResult:
    """What one step gave, alike on all ranks.

    Args:
        values: float64, "loss" and the task's metrics as means over the global batch
        grad_norm: norm of the gradient of the global batch, before clipping
        applied: False where the gradient was not finite and the step was skipped
        flagged: some rank raised its flag (it was told to stop)
    """

    values: dict[str, float]
    grad_norm: float
    applied: bool
    flagged: bool


class TrainStep:
    """Micro-batches to an update of the model, the same on every rank.

    The loss of each micro-batch is divided by the number of micro-batches in the global
    batch, so that the sum over passes and ranks is the gradient of the mean.

    Args:
        task, model, exchange: what is trained, and how gradients meet.
        micro_batches: in one step, over all ranks together.
        clip_norm: gradients are scaled down to this norm; 0 = never.
        device: where the model is.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        exchange: GradientExchange,
        *,
        micro_batches: int,
        clip_norm: float,
        device: torch.device,
    ) -> None:
        self._task = task
        self._model = model
        self._exchange = exchange
        self._micro_batches = micro_batches
        self._clip_norm = clip_norm
        self._device = device
        self._names = ("loss", *optional(task, "metrics"))
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def __call__(self, batches: Iterator[Batch], passes: int, lr: float, flag: bool) -> StepResult:
        """Runs one step.

        Args:
            batches: this rank's micro-batches; the random numbers that a forward pass draws
                follow from the seeding that goes with each.
            passes: how many these are; may be 0.
            lr: learning rate.
            flag: told to the other ranks on the way.

        Raises:
            HorovodInternalError: another rank is gone.
        """
        optimizer = self._exchange.optimizer
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = lr
        self._exchange.begin(passes)
        # One vector for all that is told beside gradients: [flag, loss, metrics ...].
        told = torch.zeros(1 + len(self._names), dtype=torch.float64, device=self._device)
        told[0] = float(flag)
        handle = None
        for done, batch in enumerate(batches, start=1):
            losses = self._losses(batch)
            told[1:] += torch.stack([losses[n].detach() for n in self._names]) / self._micro_batches
            if done == passes:
                handle = self._tell(told)  # travels during the last backward pass
            (losses["loss"] / self._micro_batches).backward()
        if passes == 0:
            handle = self._tell(told)
        self._exchange.finish()
        if handle is not None:
            hvd.synchronize(handle)
        flagged, *values = told.tolist()
        grad_norm, applied = self._update()
        return StepResult(
            dict(zip(self._names, values, strict=True)), grad_norm, applied, flagged > 0
        )

    def _losses(self, batch: Batch) -> dict[str, Tensor]:
        return self._task.loss(self._model, to_device(batch, self._device))

    def _tell(self, told: Tensor) -> int | None:
        if hvd.size() == 1:
            return None
        return hvd.allreduce_async_(told, op=hvd.Sum, name="told")

    def _update(self) -> tuple[float, bool]:
        """Clips and steps unless the gradient is not finite; (norm, whether it stepped).

        Every rank holds the same bits of the gradient, so all decide alike.
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = get_total_norm(gradients)
        applied = bool(torch.isfinite(norm))
        if applied:
            if self._clip_norm > 0:
                clip_grads_with_norm_(self._parameters, self._clip_norm, norm)
            with self._exchange.ready():
                self._exchange.optimizer.step()
        return float(norm), applied
