"""The default exchange: hvd.DistributedOptimizer sums whole gradients, once per step."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.exchange.base import (
    Exchange,
    GradientHooks,
    HookResult,
    TrainedParameters,
    gradient_buckets,
)
from hvdtrain.exchange.wire import WIRES
from hvdtrain.runtime.horovod import hvd
from hvdtrain.runtime.state_part import StatePart


class DenseExchange(Exchange):
    """Sum the gradients of all ranks with hvd.DistributedOptimizer; see Exchange.

    The exchange of a bucket starts in the last backward pass, when its gradients are complete: a
    hook of DistributedOptimizer then compresses them (`compression=`, see wire.py) and begins the
    all-reduce. `reduce` waits for the sums and decompresses them (`synchronize`).

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
        # Only used to exchange gradients: `optimizer` itself steps. Horovod would create a copy of
        # `optimizer` from its parameters alone, which does not work for every optimizer.
        self._horovod = hvd.DistributedOptimizer(
            torch.optim.SGD(self.parameters),
            named_parameters=[(self.trained.names[p], p) for p in self.parameters],
            compression=self._wire,
            op=hvd.Sum,
            groups=groups,
        )
        self._step_bytes = sum(p.numel() * self._wire.element_size(p) for p in self.parameters)
        self._distributed = elastic or hvd.size() > 1
        in_place = (
            self._distributed and wire == "float32" and self.parameters[0].device.type == "cpu"
        )
        self._memory = BucketMemory(groups) if in_place else None
        # Horovod's own hooks, which run after these, send a complete bucket.
        self._hooks = GradientHooks(self.trained, groups, self._on_gradient, lambda bucket: None)

    def _on_gradient(
        self, parameter: nn.Parameter, gradient: Tensor | None, last: bool
    ) -> HookResult:
        """Handle the gradient of one pass, see GradientHooks; Horovod's hooks send it."""
        if gradient is None or not parameter.requires_grad:
            if self._distributed and parameter.grad is None:
                # Nothing will be accumulated, but Horovod's hook needs a gradient to send.
                parameter.grad = torch.zeros_like(parameter)
            return None
        if last and self._memory is not None:
            return (self._memory.accumulate(parameter, gradient),)
        return None

    def begin(self, passes: int) -> None:
        passes = max(passes, 1)
        self._hooks.begin(passes)
        self._horovod.set_backward_passes_per_step(passes)

    def reduce(self) -> None:
        if not self._distributed:
            for parameter in self.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
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
        self._horovod.synchronize()
        sent_at = self._hooks.first_complete_at
        if hvd.size() > 1 and sent_at is not None:
            self.inflight_seconds += time.perf_counter() - sent_at
            self.bytes += self._step_bytes

    def commit(self, applied: bool) -> None:
        self._wire.commit(applied)

    def state_parts(self) -> Sequence[StatePart]:
        return self._wire.state_parts()

    def abort(self) -> None:
        self._horovod.abandon_step()
        super().abort()


class BucketMemory:
    """Contiguous memory for the gradients of each bucket, in which Horovod sums them in place.

    Horovod (patch 0024) copies gradients elsewhere into a buffer and back. The memory has the
    gradients' size; with several passes, the last one holds gradients twice.

    Args:
        groups: the buckets, each of one dtype and on one device.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self._place_of: dict[nn.Parameter, tuple[Tensor, tuple[int, ...], int]] = {}
        for group in groups:
            bucket = torch.empty(sum(p.numel() for p in group), dtype=group[0].dtype)
            offset = 0
            for parameter in group:
                strides = torch.empty_like(parameter).stride()  # dense, without gaps
                self._place_of[parameter] = bucket, strides, offset
                offset += parameter.numel()

    def accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """Return `parameter.grad` plus the last pass's gradient, which becomes the new grad.

        It is rounded like autograd's own sum.
        """
        bucket, strides, offset = self._place_of[parameter]
        # Not stored: autograd uses a tensor as the grad if it has no other reference, else a copy.
        place = bucket.as_strided(parameter.shape, strides, offset)
        if parameter.grad is None:
            return place.copy_(gradient)
        torch.add(parameter.grad, gradient, out=place)
        parameter.grad = None
        return place
