"""Exchange whose buckets do the arithmetic: they convert, send and receive gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.exchange.arrivals import Arrivals, Replacement
from hvdtrain.exchange.buckets import gradient_buckets
from hvdtrain.exchange.parameters import TrainedParameters
from hvdtrain.runtime.state_part import StatePart


class Bucket(Protocol):
    """Gradients that are sent together."""

    def begin(self) -> None:
        """Begin a step; discard data of an earlier step."""

    def arrived(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add the gradient of one micro-batch; `gradient` is not changed."""

    def send(self, several: bool) -> None:
        """Send when all gradients of this rank have arrived; `several`: there are other ranks."""

    def receive(self) -> int:
        """Set each parameter's gradient of the global batch; return the number of bytes sent.

        Raises:
            HorovodInternalError: another rank is gone.
        """
        ...

    def commit(self, applied: bool) -> None:
        """See Exchange."""


B = TypeVar("B", bound=Bucket)


def receive_each(buckets: Sequence[Bucket]) -> int:
    """Call Bucket.receive of each bucket; return the number of bytes sent."""
    return sum(bucket.receive() for bucket in buckets)


class BucketedExchange:
    """See Exchange. A bucket is sent in the last backward pass, when its gradients are complete.

    Args:
        optimizer: over parameters of `model`.
        model: gives the parameters their names.
        make: creates a bucket from its number and its parameters, of one dtype and on one device.
        parts: state that the buckets keep from step to step.
        widening: bytes that a bucket needs per byte of gradient.
        receive: receives all buckets; default: Bucket.receive of each.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        make: Callable[[int, Sequence[nn.Parameter]], B],
        parts: Callable[[Sequence[B]], Sequence[StatePart]] = lambda buckets: (),
        widening: int = 1,
        receive: Callable[[Sequence[B]], int] = receive_each,
    ) -> None:
        self._trained = TrainedParameters(optimizer, model)
        self.parameters = self._trained.in_order
        groups = gradient_buckets(self.parameters, widening)
        made = [make(number, group) for number, group in enumerate(groups)]
        self._buckets: Sequence[Bucket] = made
        self._bucket_of = {
            p: bucket for bucket, group in zip(self._buckets, groups, strict=True) for p in group
        }
        self._arrivals = Arrivals(self._trained, groups, self._arrived, self._send)
        self._parts = parts(made)
        self._receive = partial(receive, made)
        self.synchronised = True
        self.inflight_seconds = 0.0
        self.bytes = 0

    def begin(self, passes: int) -> None:
        for bucket in self._buckets:
            bucket.begin()
        self._arrivals.begin(max(passes, 1))

    def _arrived(self, parameter: nn.Parameter, gradient: Tensor | None) -> Replacement:
        if gradient is None or not parameter.requires_grad:
            return None
        self._bucket_of[parameter].arrived(parameter, gradient)
        return (None,)  # autograd has nothing left to accumulate

    def _send(self, number: int) -> None:
        self._buckets[number].send(hvd.size() > 1)

    def finish(self) -> None:
        for number in self._arrivals.incomplete():
            self._send(number)
        sent = self._receive()
        sent_at = self._arrivals.first_complete_at
        if hvd.size() > 1 and sent_at is not None:
            self.inflight_seconds += time.perf_counter() - sent_at
            self.bytes += sent

    def frozen(self) -> list[bool]:
        return self._trained.frozen()

    def rest(self, frozen: Sequence[bool]) -> None:
        self._trained.rest(frozen)

    def agreed_norm(self, own: Tensor) -> Tensor:
        return own

    def commit(self, applied: bool) -> None:
        for bucket in self._buckets:
            bucket.commit(applied)

    def synchronise(self) -> None:
        """Nothing to do: all ranks take the same steps."""

    def state_parts(self) -> Sequence[StatePart]:
        return self._parts

    def abort(self) -> None:
        """Drop the gradients after Horovod was shut down; the next `begin` clears the rest."""
        for parameter in self.parameters:
            parameter.grad = None


def flat_views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """For each parameter, in order, a view of `flat` with its shape and memory order."""
    views: dict[nn.Parameter, Tensor] = {}
    offset = 0
    for parameter in parameters:
        strides = torch.empty_like(parameter).stride()  # dense, without gaps
        views[parameter] = flat.as_strided(parameter.shape, strides, offset)
        offset += parameter.numel()
    return views
