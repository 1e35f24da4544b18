"""Exchange whose buckets do the arithmetic: they convert, send and receive gradients."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from hvdtrain.errors import UserError
from hvdtrain.exchange.base import Exchange, GradientHooks, HookResult, TrainedParameters
from hvdtrain.runtime.horovod import hvd
from hvdtrain.runtime.state_part import Scope, StatePart


class Bucket:
    """Gradients that are sent together; by default it adds the gradients of this rank.

    Args:
        name: name of the bucket's collectives.
        parameters: parameters of one dtype and on one device.
        error_feedback: keep a residual: what `send` leaves in `flat` is added to the next step's
            gradients.

    Attributes:
        flat: (n,), float32, or float64 for float64 parameters.
        view_of: for each parameter its part of `flat`, in the parameter's shape and memory order.
        residual: residual of the shape and dtype of `flat`; it changes when a step is committed.
            None: no error feedback.
        handle: handle of the collective in progress.
    """

    def __init__(
        self, name: str, parameters: Sequence[nn.Parameter], error_feedback: bool = False
    ) -> None:
        numel, device = sum(p.numel() for p in parameters), parameters[0].device
        wide = torch.float64 if parameters[0].dtype == torch.float64 else torch.float32
        self.name = name
        self.parameters = parameters
        self.flat = torch.zeros(numel, dtype=wide, device=device)
        self.view_of = flat_views(self.flat, parameters)
        self.residual = torch.zeros_like(self.flat) if error_feedback else None
        self.handle: int | None = None

    def begin(self) -> None:
        """Begin a step; discard data of an earlier step."""
        if self.residual is None:
            self.flat.zero_()
        else:
            self.flat.copy_(self.residual)
        self.handle = None

    @torch.no_grad()
    def arrived(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add the gradient of one micro-batch; `gradient` is not changed."""
        self.view_of[parameter].add_(gradient)

    def send(self, alone: bool) -> None:
        """Send when all gradients of this rank have arrived; `alone`: there are no other ranks."""
        raise NotImplementedError

    def send_second_round(self) -> None:
        """Send what depends on the sum of the first round, if anything does."""

    def receive(self) -> int:
        """Set each parameter's gradient of the global batch; return the number of bytes sent.

        Raises:
            RankLostError: another rank is gone.
        """
        raise NotImplementedError

    def commit(self, applied: bool) -> None:
        """See Exchange.commit. A skipped step does not change the residual."""
        if applied and self.residual is not None:
            self.residual.copy_(self.flat)


class BucketedExchange(Exchange):
    """See Exchange. A bucket is sent in the last backward pass, when its gradients are complete.

    Args:
        trained: the parameters.
        buckets: buckets of all these parameters, in the order in which they are sent.
        parts: state of the buckets in addition to their residuals.
    """

    def __init__(
        self,
        trained: TrainedParameters,
        buckets: Sequence[Bucket],
        parts: Sequence[StatePart] = (),
    ) -> None:
        super().__init__(trained)
        self._buckets = buckets
        self._bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        groups = [bucket.parameters for bucket in buckets]
        self._hooks = GradientHooks(trained, groups, self._on_gradient, self._send)
        residuals = [bucket.residual for bucket in buckets if bucket.residual is not None]
        self._parts = [*parts, Residuals(residuals)] if residuals else parts

    def begin(self, passes: int) -> None:
        for bucket in self._buckets:
            bucket.begin()
        self._hooks.begin(max(passes, 1))

    def _on_gradient(
        self, parameter: nn.Parameter, gradient: Tensor | None, last: bool
    ) -> HookResult:
        if gradient is None or not parameter.requires_grad:
            return None
        self._bucket_of[parameter].arrived(parameter, gradient)
        return (None,)  # autograd has nothing left to accumulate

    def _send(self, number: int) -> None:
        self._buckets[number].send(alone=hvd.size() == 1)

    def reached(self) -> Collection[nn.Parameter] | None:
        return None if self._parts else self._hooks.reached

    def memory(self) -> Mapping[nn.Parameter, Tensor]:
        pairs = [pair for bucket in self._buckets for pair in bucket.view_of.items()]
        return {p: view for p, view in pairs if view.dtype == p.dtype}

    def reduce(self) -> None:
        for number in self._hooks.incomplete():
            self._send(number)
        # The second round is sent while later buckets may still be in transfer.
        for bucket in self._buckets:
            bucket.send_second_round()
        sent = sum(bucket.receive() for bucket in self._buckets)
        sent_at = self._hooks.first_complete_at
        if hvd.size() > 1 and sent_at is not None:
            self.inflight_seconds += time.perf_counter() - sent_at
            self.bytes += sent

    def commit(self, applied: bool) -> None:
        for bucket in self._buckets:
            bucket.commit(applied)

    def state_parts(self) -> Sequence[StatePart]:
        return self._parts


class Residuals:
    """The local part "residual": what compression has omitted from a rank's gradients so far.

    A rank that inherits from several ranks holds the sum of their residuals: nothing is lost when
    there are fewer ranks. A rank that joins starts with zero. The residual of a killed rank is
    lost.

    Args:
        residuals: residuals of each bucket.
    """

    name = "residual"
    scope: Scope = "local"

    def __init__(self, residuals: Sequence[Tensor]) -> None:
        self._residuals = residuals

    def tensors(self) -> dict[str, Tensor]:
        return {f"bucket.{number}": tensor for number, tensor in enumerate(self._residuals)}

    def norm(self) -> float:
        """Euclidean norm of all residuals; another thread may call it in the middle of a step."""
        return float(sum(tensor.double().square().sum() for tensor in self._residuals)) ** 0.5

    def compared(self) -> dict[str, Tensor]:
        return {}

    def load(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """Raise UserError if the residuals belong to other buckets."""
        own = self.tensors()
        for one in saved:
            require_same_buckets(own, one)
        for name, tensor in own.items():
            tensor.zero_()
            for one in saved:
                tensor.add_(one[name].to(tensor.device))


def require_same_buckets(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Check that state saved by bucket fits the current buckets.

    Raises:
        UserError: the buckets differ.
    """
    if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in saved.items()}:
        raise UserError(
            "the checkpoint's state of exchange.compression was saved by another version of "
            "hvdtrain or with other exchange keys; use the same keys, or another run.id"
        )


def flat_views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """For each parameter, in order, a view of `flat` with its shape and memory order."""
    views: dict[nn.Parameter, Tensor] = {}
    offset = 0
    for parameter in parameters:
        strides = torch.empty_like(parameter).stride()  # dense, without gaps
        views[parameter] = flat.as_strided(parameter.shape, strides, offset)
        offset += parameter.numel()
    return views


def set_gradients(views: Mapping[nn.Parameter, Tensor]) -> None:
    """Set each parameter's gradient, converted to the parameter's dtype."""
    for parameter, view in views.items():
        parameter.grad = view.to(parameter.dtype)
