"""The default exchange: hvd.DistributedOptimizer sums whole gradients, once per step."""

from __future__ import annotations

import time
from collections.abc import Sequence

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.exchange.arrivals import Arrivals, Replacement
from hvdtrain.exchange.bucket_memory import BucketMemory
from hvdtrain.exchange.buckets import gradient_buckets
from hvdtrain.exchange.parameters import TrainedParameters
from hvdtrain.exchange.wire import WIRES
from hvdtrain.runtime.state_part import StatePart


class DenseExchange:
    """Sum the gradients of all ranks with hvd.DistributedOptimizer; see Exchange.

    The exchange of a bucket starts in the last backward pass, when its gradients are complete.
    Horovod compresses them (`wire`) before the all-reduce and decompresses the sums in `finish`.

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
        self._trained = TrainedParameters(optimizer, model)
        self.parameters = self._trained.in_order
        groups = gradient_buckets(self.parameters)
        self._wire = WIRES[wire]()
        # Only used to exchange gradients: `optimizer` itself steps. Horovod would create a copy of
        # `optimizer` from its parameters alone, which does not work for every optimizer.
        self._horovod = hvd.DistributedOptimizer(
            torch.optim.SGD(self.parameters),
            named_parameters=[(self._trained.names[p], p) for p in self.parameters],
            compression=self._wire,
            op=hvd.Sum,
            groups=groups,
        )
        self.synchronised = True
        self.inflight_seconds = 0.0
        self.bytes = 0
        self._step_bytes = sum(p.numel() * self._wire.element_size(p) for p in self.parameters)
        self._distributed = elastic or hvd.size() > 1
        in_place = (
            self._distributed and wire == "float32" and self.parameters[0].device.type == "cpu"
        )
        self._memory = BucketMemory(groups) if in_place else None
        # Horovod's own hooks, which run after these, send a complete bucket.
        self._arrivals = Arrivals(self._trained, groups, self._arrived, lambda bucket: None)

    def _arrived(self, parameter: nn.Parameter, gradient: Tensor | None) -> Replacement:
        if gradient is None or not parameter.requires_grad:
            if self._distributed and parameter.grad is None:
                # Nothing will be accumulated, but Horovod's hook needs a gradient to send.
                parameter.grad = torch.zeros_like(parameter)
            return None
        if self._memory is not None and self._arrivals.is_last(parameter):
            return (self._memory.take(parameter, gradient),)
        return None

    def begin(self, passes: int) -> None:
        """Announce the number of backward passes of this step on this rank; may be 0."""
        passes = max(passes, 1)
        self._arrivals.begin(passes)
        self._horovod.set_backward_passes_per_step(passes)

    def finish(self) -> None:
        """Wait until every gradient is the sum over the ranks.

        Raises:
            HorovodInternalError: another rank is gone.
        """
        if not self._distributed:
            for parameter in self.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            # The hooks detect untrainable models in the first step; one process needs them no more.
            self._arrivals.stop()
            return
        while missing := self._arrivals.unreached():
            frozen = [p for p in missing if not p.requires_grad]
            for still in frozen:
                still.requires_grad_(True)
            try:
                torch.autograd.backward(missing, [torch.zeros_like(p) for p in missing])
            finally:
                for still in frozen:
                    still.requires_grad_(False)
        self._horovod.synchronize()
        sent_at = self._arrivals.first_complete_at
        if hvd.size() > 1 and sent_at is not None:
            self.inflight_seconds += time.perf_counter() - sent_at
            self.bytes += self._step_bytes

    def frozen(self) -> list[bool]:
        return self._trained.frozen()

    def rest(self, frozen: Sequence[bool]) -> None:
        self._trained.rest(frozen)

    def agreed_norm(self, own: Tensor) -> Tensor:
        return own

    def commit(self, applied: bool) -> None:
        self._wire.commit(applied)

    def synchronise(self) -> None:
        """Nothing to do: all ranks take the same steps."""

    def state_parts(self) -> Sequence[StatePart]:
        return self._wire.state_parts()

    def abort(self) -> None:
        """Clear the state of a failed exchange: handles, counters, incomplete gradients.

        Call it after `hvd.shutdown()`, which ends every pending exchange.
        """
        self._horovod.abandon_step()
        for parameter in self.parameters:
            parameter.grad = None
