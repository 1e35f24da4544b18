"""The default exchange: Horovod sums whole gradients, once per step."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.exchange.base import (
    Exchange,
    GradientHooks,
    HookResult,
    TrainedParameters,
    gradient_buckets,
    trainable,
)
from hvdtrain.exchange.bucketed import flat_views, set_gradients
from hvdtrain.exchange.wire import WIRES
from hvdtrain.runtime.collectives import begin_sum, completed
from hvdtrain.runtime.horovod import hvd
from hvdtrain.runtime.state_part import StatePart


class DenseExchange(Exchange):
    """Sum the gradients of all ranks; see Exchange.

    The exchange of a bucket starts in the last backward pass, when its gradients are complete.
    Gradients that are sent as they are, are summed in their bucket's memory, as one tensor. Others
    are compressed (`compression=`, see wire.py) and summed by hvd.DistributedOptimizer, from its
    own hooks.

    Args:
        optimizer: over parameters of `model`.
        model: gives the parameters their names.
        elastic: the number of ranks may change from 1 to more; Horovod's optimizer reads from
            HOROVOD_ELASTIC that it needs its hooks.
        wire: wire format of the gradients, one of wire.WIRES.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        elastic: bool = False,
        wire: str = "float32",
    ) -> None:
        super().__init__(TrainedParameters(optimizer, model))
        groups = gradient_buckets(self.parameters)
        self._wire = WIRES[wire]()
        self._step_bytes = sum(p.numel() * self._wire.element_size(p) for p in self.parameters)
        self._distributed = elastic or hvd.size() > 1
        in_place = self._distributed and wire == "float32"
        self._memory = BucketMemory(groups) if in_place else None
        if self._memory is None:
            # Only used to exchange gradients: `optimizer` itself steps. Horovod would create a copy
            # of `optimizer` from its parameters alone, which does not work for every optimizer.
            with trainable(self.parameters):
                self._horovod = hvd.DistributedOptimizer(
                    torch.optim.SGD(self.parameters),
                    named_parameters=[(self.trained.names[p], p) for p in self.parameters],
                    compression=self._wire,
                    op=hvd.Sum,
                    groups=groups,
                )
        # Horovod's own hooks, which run after these, send a complete bucket.
        complete = self._memory.send if self._memory is not None else lambda bucket: None
        self._hooks = GradientHooks(self.trained, groups, self._on_gradient, complete)

    def _on_gradient(
        self, parameter: nn.Parameter, gradient: Tensor | None, last: bool
    ) -> HookResult:
        """Handle the gradient of one pass, see GradientHooks."""
        if gradient is not None and not parameter.requires_grad:
            gradient = None  # autograd accumulates nothing
        if self._memory is not None:
            if gradient is not None:
                self._memory.add(parameter, gradient)
            return (None,)  # autograd has nothing left to accumulate
        if gradient is None and self._distributed and parameter.grad is None:
            # Nothing will be accumulated, but Horovod's hook needs a gradient to send.
            parameter.grad = torch.zeros_like(parameter)
        return None

    def begin(self, passes: int) -> None:
        passes = max(passes, 1)
        self._hooks.begin(passes)
        if self._memory is not None:
            self._memory.begin()
        else:
            self._horovod.set_backward_passes_per_step(passes)

    def reached(self) -> Collection[nn.Parameter] | None:
        # One process keeps the gradients, None or not, as autograd leaves them.
        return self._hooks.reached if self._distributed and not self.state_parts() else None

    def memory(self) -> Mapping[nn.Parameter, Tensor]:
        return self._memory.place_of if self._memory is not None else {}

    def reduce(self) -> None:
        if not self._distributed:
            # The hooks detect untrainable models in the first step; one process needs them no more.
            self._hooks.stop()
            return
        # Other ranks may have reached these parameters, so this rank has to send them too. A
        # backward pass with zeros triggers the hooks, also for frozen parameters.
        while missing := self._hooks.unreached():
            frozen = [p for p in missing if not p.requires_grad]
            for still in frozen:
                still.requires_grad_(True)
            try:
                torch.autograd.backward(missing, [torch.zeros_like(p) for p in missing])
            finally:
                for still in frozen:
                    still.requires_grad_(False)
        if self._memory is None:
            self._horovod.synchronize()
        else:
            self._memory.receive()
        sent_at = self._hooks.first_complete_at
        if hvd.size() > 1 and sent_at is not None:
            self.inflight_seconds += time.perf_counter() - sent_at
            self.bytes += self._step_bytes

    def commit(self, applied: bool) -> None:
        self._wire.commit(applied)

    def state_parts(self) -> Sequence[StatePart]:
        return self._wire.state_parts()

    def abort(self) -> None:
        if self._memory is None:
            self._horovod.abandon_step()
        else:
            self._memory.abandon()
        super().abort()


class BucketMemory:
    """Contiguous memory for the gradients of each bucket, in which Horovod sums them in place.

    It replaces `parameter.grad` until `receive`: a step needs the gradients' size, with any number
    of passes.

    On a GPU, autograd calls hooks with the stream in which it computes gradients as the current
    one. They are added in it, and Horovod records it when a bucket is sent: its sum begins after
    the additions. `receive` returns when the sums have ended on the device.

    Args:
        groups: the buckets, each of one dtype and on one device.

    Attributes:
        place_of: a view of this memory for each parameter.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self._buckets = [
            torch.empty(sum(p.numel() for p in group), dtype=group[0].dtype, device=group[0].device)
            for group in groups
        ]
        self._groups = groups
        self.place_of: dict[nn.Parameter, Tensor] = {}
        for bucket, group in zip(self._buckets, groups, strict=True):
            self.place_of |= flat_views(bucket, group)
        self._unwritten: dict[nn.Parameter, Tensor] = {}  # places without a gradient of this step
        self._handles: list[int] = []

    def begin(self) -> None:
        """Begin a step."""
        self._unwritten = self.place_of.copy()

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add the gradient of one pass; the sum is rounded like autograd's own."""
        # Not torch.no_grad(), which costs more than small sums: in each pass, for each parameter.
        gradient = gradient.detach()
        if (place := self._unwritten.pop(parameter, None)) is not None:
            place.copy_(gradient)
        else:
            self.place_of[parameter].add_(gradient)

    def send(self, number: int) -> None:
        """Begin the all-reduce of a complete bucket; a missing gradient counts as zeros."""
        for parameter in self._groups[number]:
            if (place := self._unwritten.pop(parameter, None)) is not None:
                place.zero_()
        self._handles.append(begin_sum(self._buckets[number], f"dense.{number}"))

    def receive(self) -> None:
        """Wait for the sums, which become the gradients.

        Raises:
            RankLostError: another rank is gone.
        """
        while self._handles:
            completed(self._handles.pop(0))
        set_gradients(self.place_of)

    def abandon(self) -> None:
        """Forget a step that failed; see Exchange.abort."""
        self._handles.clear()
