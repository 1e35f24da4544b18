"""Sums that do not depend on their order: one model, bit by bit, on any number of ranks.

Floating-point sums are rounded, and how depends on which rank adds what to what. Here the gradient
of each micro-batch becomes a fixed-point number, a whole multiple of `UNIT` in an int64, as soon
as backward has it; integers are added without rounding, over micro-batches and over ranks.
(Reproducible sums by pre-rounding to one unit: Demmel and Nguyen, "Fast reproducible
floating-point summation", ARITH 2013.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.exchange.arrivals import Arrivals, Replacement
from hvdtrain.exchange.buckets import bucket_limit, buckets
from hvdtrain.exchange.parameters import TrainedParameters
from hvdtrain.runtime.collectives import begin_sum, completed
from hvdtrain.runtime.state_part import StatePart

# Elements of float32 gradients from 1e-6 up are represented without loss, and sums up to 5e5.
_UNITS = 2.0**44
UNIT = 1 / _UNITS
# Elements that are converted at once: on CPUs what lies between stays in a core's cache.
_AT_ONCE = 1 << 15


class ExactExchange:
    """Sums the gradients of all micro-batches and ranks as fixed-point numbers; see Exchange.

    What a gradient has below `UNIT` is cut off. A micro-batch whose gradient is not finite, or so
    large that the sum might not fit, makes the gradient of the step NaN on all ranks: the step is
    skipped.

    Args:
        optimizer: over parameters of `model`.
        model: gives the parameters their names.
        micro_batches: in one step, over all ranks together.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, micro_batches: int) -> None:
        self._trained = TrainedParameters(optimizer, model)
        self.parameters = self._trained.in_order
        groups = buckets(self.parameters, bucket_limit(self.parameters) // 2)  # int64: twice
        # A sum over all micro-batches fits in 63 bits.
        largest = 2.0**62 * UNIT / micro_batches
        self._buckets = [_Bucket(group, largest) for group in groups]
        self._bucket_of = {
            p: bucket for bucket, group in zip(self._buckets, groups, strict=True) for p in group
        }
        self._arrivals = Arrivals(self._trained, groups, self._arrived, self._send)
        self._handles: dict[int, int] = {}
        self.inflight_seconds = 0.0
        self.bytes = 0

    def begin(self, passes: int) -> None:
        """Announces the number of backward passes of this step on this rank; may be 0."""
        for bucket in self._buckets:
            bucket.clear()
        self._arrivals.begin(max(passes, 1))

    def _arrived(self, parameter: nn.Parameter, gradient: Tensor | None) -> Replacement:
        if gradient is None or not parameter.requires_grad:
            return None
        self._bucket_of[parameter].arrived(parameter, gradient)
        return (None,)  # autograd has nothing to add up any more

    def _send(self, bucket: int) -> None:
        self._buckets[bucket].add_pending()
        if hvd.size() > 1:
            self._handles[bucket] = begin_sum(self._buckets[bucket].sums, f"exact.{bucket}")

    def finish(self) -> None:
        """Waits until every gradient is the sum over the ranks.

        Raises:
            HorovodInternalError: another rank is gone.
        """
        for number in self._arrivals.incomplete():
            self._send(number)
        while self._handles:
            completed(self._handles.popitem()[1])
        fit = not torch.cat([bucket.misfits for bucket in self._buckets]).any()
        for bucket in self._buckets:
            bucket.give_gradients(fit)
        sent_at = self._arrivals.first_complete_at
        if hvd.size() > 1 and sent_at is not None:
            self.inflight_seconds += time.perf_counter() - sent_at
            self.bytes += sum(b.sums.numel() * b.sums.element_size() for b in self._buckets)

    def frozen(self) -> list[bool]:
        return self._trained.frozen()

    def rest(self, frozen: Sequence[bool]) -> None:
        self._trained.rest(frozen)

    def commit(self, applied: bool) -> None:
        """Sums of integers keep nothing from step to step."""

    def state_parts(self) -> Sequence[StatePart]:
        return ()

    def abort(self) -> None:
        """Forgets an exchange that failed; call it after Horovod was shut down."""
        self._handles.clear()
        for parameter in self.parameters:
            parameter.grad = None


class _Bucket:
    """Gradients that travel together.

    Those of a micro-batch are converted together, once all have come: a model has many small
    ones, for each of which the calls would cost more than the arithmetic.

    Args:
        parameters: of one dtype, on one device.
        largest: element of a micro-batch's gradient.

    Attributes:
        sums: int64 (n + 1,): of all gradients in units, and last `misfits`.
        misfits: int64 (1,): how often gradients were not finite or too large.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], largest: float) -> None:
        numel, device = sum(p.numel() for p in parameters), parameters[0].device
        self.sums = torch.zeros(numel + 1, dtype=torch.int64, device=device)
        self.misfits = self.sums[-1:]
        self._largest = largest
        # int64 to float32 is one rounding, to nearest, on CPUs and on GPUs.
        wide = torch.float64 if parameters[0].dtype == torch.float64 else torch.float32
        self._floats = torch.empty(numel, dtype=wide, device=device)
        self._float_of = _views(self._floats, parameters)
        self._pending: dict[nn.Parameter, Tensor] = {}
        self._at_once = _AT_ONCE if device.type == "cpu" else numel

    def clear(self) -> None:
        self.sums.zero_()
        self._pending.clear()

    def arrived(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Takes the gradient of one micro-batch; it is not changed."""
        if parameter in self._pending:  # the next micro-batch, and this one has not all
            self.add_pending()
        self._pending[parameter] = gradient
        if len(self._pending) == len(self._float_of):
            self.add_pending()

    @torch.no_grad()
    def add_pending(self) -> None:
        """Adds what has come of one micro-batch."""
        if not self._pending:
            return
        for parameter, view in self._float_of.items():
            if parameter not in self._pending:
                view.zero_()
        torch._foreach_copy_([self._float_of[p] for p in self._pending], [*self._pending.values()])
        self._pending.clear()
        smallest, largest = torch.aminmax(self._floats)
        fits = (smallest >= -self._largest) & (largest <= self._largest)  # not so for NaN
        self.misfits.add_(~fits)
        parts = self._floats.split(self._at_once), self.sums[:-1].split(self._at_once)
        for part, total in zip(*parts, strict=True):
            total.add_(part.mul_(_UNITS).long())

    def give_gradients(self, fit: bool) -> None:
        """Gives each parameter its sum as its gradient; NaN unless all gradients `fit`."""
        if fit:
            self._floats.copy_(self.sums[:-1]).mul_(UNIT)
        else:
            self._floats.fill_(float("nan"))
        for parameter, view in self._float_of.items():
            parameter.grad = view.to(parameter.dtype)


def _views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Of each parameter, in order, a part of `flat` that has its shape and its order in memory."""
    views, offset = {}, 0
    for parameter in parameters:
        strides = torch.empty_like(parameter).stride()  # without the gaps that some have
        views[parameter] = flat.as_strided(parameter.shape, strides, offset)
        offset += parameter.numel()
    return views
