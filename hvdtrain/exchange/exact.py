"""Sums that do not depend on their order: a bitwise identical model on any number of ranks.

Floating-point sums are rounded, and the rounding depends on which rank adds which values. Here the
gradient of each micro-batch becomes a fixed-point number, an integer multiple of `UNIT` in an
int64, when backward has computed it; integers are added without rounding, over micro-batches and
over ranks. (Reproducible sums by pre-rounding to one unit: Demmel and Nguyen, "Fast reproducible
floating-point summation", ARITH 2013.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.exchange.base import TrainedParameters, gradient_buckets
from hvdtrain.exchange.bucketed import Bucket, BucketedExchange, set_gradients
from hvdtrain.runtime.collectives import begin_sum, completed

# Represents float32 gradient elements of at least 1e-6 without loss, and sums up to 5e5.
_UNITS = 2.0**44
UNIT = 1 / _UNITS
# Elements converted at once: on CPUs, intermediate results stay in a core's cache.
_AT_ONCE = 1 << 15


def exact_exchange(optimizer: Optimizer, model: nn.Module, micro_batches: int) -> BucketedExchange:
    """Sum the gradients of all micro-batches and ranks as fixed-point numbers.

    Fractions of `UNIT` in a gradient are truncated. If the gradient of a micro-batch is not finite,
    or so large that the sum might overflow, the gradient of the step becomes NaN on all ranks, and
    the step is skipped.

    Args:
        micro_batches: in one step, over all ranks together.
    """
    largest = 2.0**62 * UNIT / micro_batches  # the sum over all of them fits in 63 bits

    trained = TrainedParameters(optimizer, model)
    groups = gradient_buckets(trained.in_order, widening=2)
    buckets = [
        ExactBucket(f"exact.{number}", group, largest) for number, group in enumerate(groups)
    ]
    return BucketedExchange(trained, buckets)


class ExactBucket(Bucket):
    """Bucket whose gradients are added as integers; `flat` holds one micro-batch's gradients.

    The gradients of a micro-batch are converted together when all have arrived: a model has many
    small gradients, for which one call each would cost more than the arithmetic.

    Args:
        name: name of the bucket's all-reduce.
        largest: largest allowed element of a micro-batch's gradient.
    """

    def __init__(self, name: str, parameters: Sequence[nn.Parameter], largest: float) -> None:
        super().__init__(name, parameters)
        numel, device = len(self.flat), self.flat.device
        self._largest = largest
        self._sums = torch.zeros(numel + 1, dtype=torch.int64, device=device)
        self._misfits = self._sums[-1:]  # how often gradients were not finite or too large
        self._pending: dict[nn.Parameter, Tensor] = {}
        self._at_once = _AT_ONCE if device.type == "cpu" else numel

    def begin(self) -> None:
        self._sums.zero_()
        self._pending.clear()
        self.handle = None

    def arrived(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if parameter in self._pending:  # the next micro-batch has begun; this one is incomplete
            self._add_pending()
        self._pending[parameter] = gradient
        if len(self._pending) == len(self.view_of):
            self._add_pending()

    @torch.no_grad()
    def _add_pending(self) -> None:
        """Add the gradients of one micro-batch that have arrived."""
        if not self._pending:
            return
        for parameter, view in self.view_of.items():
            if parameter not in self._pending:
                view.zero_()
        torch._foreach_copy_([self.view_of[p] for p in self._pending], [*self._pending.values()])
        self._pending.clear()
        smallest, largest = torch.aminmax(self.flat)
        fits = (smallest >= -self._largest) & (largest <= self._largest)  # False for NaN
        self._misfits.add_(~fits)
        parts = self.flat.split(self._at_once), self._sums[:-1].split(self._at_once)
        for part, total in zip(*parts, strict=True):
            total.add_(part.mul_(_UNITS).long())

    def send(self, alone: bool) -> None:
        self._add_pending()
        if not alone:
            self.handle = begin_sum(self._sums, self.name)

    def receive(self) -> int:
        if self.handle is not None:
            completed(self.handle)
        unit = torch.where(self._misfits > 0, math.nan, UNIT)  # read by no CPU: that would wait
        # int64 to float32 is a single rounding, to nearest, on CPUs and on GPUs.
        self.flat.copy_(self._sums[:-1]).mul_(unit)
        set_gradients(self.view_of)
        return self._sums.nbytes
