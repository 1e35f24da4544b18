"""The default exchange: hvd.DistributedOptimizer sums whole gradients, once a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from hvdtrain.errors import UnsupportedTaskError
from hvdtrain.exchange.buckets import bucket_limit, buckets
from hvdtrain.optim.optimizer import parameter_names
from hvdtrain.optim.supported import SPARSE
from hvdtrain.runtime.state_part import StatePart


class _AsInMemory:
    """What Horovod calls a compression: hands it a gradient as a vector, in the order in memory.

    Horovod wants row-major tensors. A gradient lies in memory as its parameter does, on every
    rank, so parameters in another order (channels_last) can be summed too, without a copy.
    """

    @staticmethod
    def compress(gradient: Tensor) -> tuple[Tensor, tuple[torch.Size, tuple[int, ...]] | None]:
        if gradient.is_contiguous():
            return gradient, None
        vector = gradient.as_strided((gradient.numel(),), (1,))
        return vector, (gradient.shape, gradient.stride())

    @staticmethod
    def decompress(summed: Tensor, layout: tuple[torch.Size, tuple[int, ...]] | None) -> Tensor:
        return summed if layout is None else summed.as_strided(*layout)


class DenseExchange:
    """Sums the gradients of all ranks with hvd.DistributedOptimizer; see Exchange.

    The exchange of a bucket starts inside the last backward pass, as soon as its gradients are
    there.

    A task may freeze parameters in the middle of a run (`requires_grad_(False)`) and thaw them
    again. All of their bucket travels nevertheless, with zeros for them, so that no rank waits
    for another and sums are rounded as before; `rest` then takes their gradients away, and the
    optimizer passes them over: no momentum, no weight decay.

    Args:
        optimizer: over parameters of `model`.
        model: gives the parameters their names.
        elastic: the number of ranks may change from 1 to more; Horovod's optimizer sees from
            HOROVOD_ELASTIC that it needs its hooks.

    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, elastic: bool = False) -> None:
        names = parameter_names(optimizer, model)
        # In the model's order: that is what backward runs through from the end.
        self.parameters = [p for p in model.parameters() if p in names]
        groups = buckets(self.parameters, bucket_limit(self.parameters))
        # Its gradients' exchange alone is used: the optimizer itself steps.
        self._horovod = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=[(names[p], p) for p in self.parameters],
            compression=_AsInMemory,
            op=hvd.Sum,
            groups=groups,
        )
        self.inflight_seconds = 0.0
        self.bytes = 0
        self._step_bytes = sum(p.numel() * p.element_size() for p in self.parameters)
        self._bucket_of = {p: number for number, bucket in enumerate(groups) for p in bucket}
        self._bucket_sizes = [len(bucket) for bucket in groups]
        self._missing: list[int] = []  # parameters of each bucket that are not ready yet
        self._sent_at: float | None = None
        self._passes = 0
        self._reached: dict[Tensor, int] = {}
        self._distributed = elastic or hvd.size() > 1
        self._names = names
        self._unknown = [(n, p) for n, p in model.named_parameters() if p not in names]
        # Before Horovod's hook at the same place, which also runs where nothing is added up.
        self._nodes = [get_gradient_edge(p).node for p in self.parameters]
        self._hooks = [
            node.register_prehook(partial(self._count, parameter))
            for node, parameter in zip(self._nodes, self.parameters, strict=True)
        ]

    def _count(self, parameter: nn.Parameter, gradients: tuple[Tensor | None, ...]) -> None:
        """A backward pass is about to add to the gradient of `parameter`."""
        gradient = gradients[0]
        if gradient is not None and gradient.layout != torch.strided:
            raise UnsupportedTaskError(f"the model's parameter {self._names[parameter]} {SPARSE}")
        self._reached[parameter] = reached = self._reached.get(parameter, 0) + 1
        if reached > self._passes:
            raise UnsupportedTaskError(
                f"the model's parameter {self._names[parameter]} got its gradient more than once "
                "in a backward pass, as reentrant checkpointing of a layer that is used twice "
                "does: give torch.utils.checkpoint use_reentrant=False"
            )
        if not self._distributed:
            return
        if parameter.grad is None and (gradient is None or not parameter.requires_grad):
            # Nothing will be added up, and Horovod's hook wants something to send.
            parameter.grad = torch.zeros_like(parameter)
        if reached == self._passes:
            bucket = self._bucket_of[parameter]
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0 and self._sent_at is None:
                self._sent_at = time.perf_counter()

    def begin(self, passes: int) -> None:
        """Announces the number of backward passes of this step on this rank; may be 0."""
        self._passes = max(passes, 1)
        self._reached.clear()
        self._missing = list(self._bucket_sizes)
        self._sent_at = None
        self._horovod.set_backward_passes_per_step(self._passes)

    def finish(self) -> None:
        """Waits until every gradient is the sum over the ranks.

        Raises:
            HorovodInternalError: another rank is gone.
        """
        if not self._distributed:
            for parameter in self.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            # They looked for models that cannot be trained; a single process needs no other.
            while self._hooks:
                self._hooks.pop().remove()
            return
        while missing := self._unreached():
            frozen = [p for p in missing if not p.requires_grad]
            for still in frozen:
                still.requires_grad_(True)
            try:
                torch.autograd.backward(missing, [torch.zeros_like(p) for p in missing])
            finally:
                for still in frozen:
                    still.requires_grad_(False)
        self._horovod.synchronize()
        if hvd.size() > 1 and self._sent_at is not None:
            self.inflight_seconds += time.perf_counter() - self._sent_at
            self.bytes += self._step_bytes

    def frozen(self) -> list[bool]:
        """Of each of `parameters`, whether the task has frozen it here.

        Raises:
            UnsupportedTaskError: the task wants to train a parameter that was frozen when it made
                the model.
        """
        for name, parameter in self._unknown:
            if parameter.requires_grad:
                raise UnsupportedTaskError(
                    f"the model's parameter {name} was frozen when the task made the model, so "
                    "the optimizer does not know it: let model() return it trainable, and freeze "
                    "it in loss() until it is to be trained"
                )
        return [not parameter.requires_grad for parameter in self.parameters]

    def rest(self, frozen: Sequence[bool]) -> None:
        """Lets parameters rest in this step; every rank names the same."""
        for parameter, rests in zip(self.parameters, frozen, strict=True):
            if rests:
                parameter.grad = None

    def state_parts(self) -> Sequence[StatePart]:
        return ()

    def abort(self) -> None:
        """Clears what an exchange that failed has left: handles, counters, half a gradient.

        Call it after `hvd.shutdown()`, which ends every exchange that was under way.
        """
        self._horovod.abandon_step()
        for parameter in self.parameters:
            parameter.grad = None

    def _unreached(self) -> list[Tensor]:
        return [p for p in self.parameters if self._reached.get(p, 0) < self._passes]
