"""Tracking of the gradients that backward passes have computed in a step, by bucket."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hvdtrain.errors import UnsupportedTaskError
from hvdtrain.exchange.parameters import TrainedParameters
from hvdtrain.optim.supported import SPARSE

# Replacement of a gradient that autograd is about to accumulate; None: unchanged.
Replacement = tuple[Tensor | None, ...] | None


class Arrivals:
    """Count the gradients of each parameter, up to the number of backward passes of a step.

    Args:
        groups: the buckets.
        arrived: called with a parameter and its gradient of one pass, before autograd adds the
            gradient to `parameter.grad`; the gradient is None if a pass gives none.
        complete: called with a bucket's number when all its gradients of the last pass have
            arrived.

    Attributes:
        first_complete_at: time.perf_counter() when the step's first bucket was complete; None
            before.
    """

    def __init__(
        self,
        parameters: TrainedParameters,
        groups: Sequence[Sequence[nn.Parameter]],
        arrived: Callable[[nn.Parameter, Tensor | None], Replacement],
        complete: Callable[[int], None],
    ) -> None:
        self._parameters = parameters
        self._arrived = arrived
        self._complete = complete
        self._bucket_of = {p: number for number, bucket in enumerate(groups) for p in bucket}
        self._bucket_sizes = [len(bucket) for bucket in groups]
        self._missing: list[int] = []  # parameters of each bucket that are not ready yet
        self._reached: dict[Tensor, int] = {}
        self._passes = 0
        self.first_complete_at: float | None = None
        # Runs before other hooks at the same node, and also if nothing is accumulated.
        self._nodes = [get_gradient_edge(p).node for p in parameters.in_order]
        self._hooks = [
            node.register_prehook(partial(self._count, parameter))
            for node, parameter in zip(self._nodes, parameters.in_order, strict=True)
        ]

    def begin(self, passes: int) -> None:
        """Begin a step of `passes` backward passes; at least 1 is counted."""
        self._passes = passes
        self._reached.clear()
        self._missing = list(self._bucket_sizes)
        self.first_complete_at = None

    def unreached(self) -> list[nn.Parameter]:
        """Parameters that some pass has not reached so far."""
        return [p for p in self._parameters.in_order if self._reached.get(p, 0) < self._passes]

    def is_last(self, parameter: nn.Parameter) -> bool:
        """Whether the gradient that has arrived is from the step's last pass."""
        return self._reached.get(parameter, 0) == self._passes

    def incomplete(self) -> list[int]:
        """Numbers of the incomplete buckets."""
        return [number for number, missing in enumerate(self._missing) if missing]

    def stop(self) -> None:
        """Remove the hooks and stop counting."""
        while self._hooks:
            self._hooks.pop().remove()

    def _count(self, parameter: nn.Parameter, gradients: tuple[Tensor | None, ...]) -> Replacement:
        gradient = gradients[0]
        name = self._parameters.names[parameter]
        if gradient is not None and gradient.layout != torch.strided:
            raise UnsupportedTaskError(f"the model's parameter {name} {SPARSE}")
        self._reached[parameter] = reached = self._reached.get(parameter, 0) + 1
        if reached > self._passes:
            raise UnsupportedTaskError(
                f"the model's parameter {name} got its gradient more than once in a backward "
                "pass, as reentrant checkpointing of a layer that is used twice does: give "
                "torch.utils.checkpoint use_reentrant=False"
            )
        replacement = self._arrived(parameter, gradient)
        if reached == self._passes:
            bucket = self._bucket_of[parameter]
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0:
                if self.first_complete_at is None:
                    self.first_complete_at = time.perf_counter()
                self._complete(bucket)
        return replacement
