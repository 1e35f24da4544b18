"""From the gradient of the global batch to the next parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from hvdtrain.exchange.base import Exchange
from hvdtrain.optim.loss_scale import LossScale
from hvdtrain.optim.optimizer import set_learning_rate
from hvdtrain.runtime.parts import local


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
