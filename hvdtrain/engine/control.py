"""What ranks tell each other beside gradients in each step: one small all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from hvdtrain.runtime.collectives import begin_sum, completed
from hvdtrain.runtime.context import RankContext


@dataclass(frozen=True)
class Flags:
    """What this rank brings to a step beside its micro-batches.

    Args:
        stop: this rank is asked to stop.
        membership_changed: this rank has heard that processes join or leave.
        step: steps done before this one.
    """

    stop: bool
    membership_changed: bool
    step: int


@dataclass(frozen=True)
class Agreed:
    """The sums over all ranks.

    Args:
        stops, changes: ranks whose flag is raised.
        steps: of all ranks' `step`.
        samples: that all ranks used.
        sums, weights: of the loss and each metric, see Sums.
        frozen: of each parameter, how many ranks have frozen it.
    """

    stops: float
    changes: float
    steps: float
    samples: float
    sums: list[float]
    weights: list[float]
    frozen: list[float]


class ControlVector:
    """The vector of one step, float64.

    It is sent before the last backward pass, so that it travels while that computes.

    Args:
        samples: that this rank uses.
        values: how many there are of the loss and the metrics.
        parameters: how many are exchanged.
    """

    def __init__(
        self,
        flags: Flags,
        samples: int,
        values: int,
        parameters: int,
        context: RankContext,
    ) -> None:
        head = [flags.stop, flags.membership_changed, flags.step, samples]
        self._sizes = [len(head), values, values, parameters]
        empty = [0.0] * sum(self._sizes[1:])
        self._vector = torch.tensor([*map(float, head), *empty], dtype=torch.float64).to(
            context.device
        )
        _, self.sums, self.weights, self._frozen = self._vector.split(self._sizes)
        self._alone = context.mesh.data.size == 1
        self._handle: int | None = None

    def send(self, frozen: Sequence[bool] = ()) -> None:
        """Begins the exchange; `sums` and `weights` are complete.

        Args:
            frozen: of each parameter; empty where none is known to be.
        """
        if any(frozen):
            self._frozen.copy_(torch.tensor(frozen))
        if not self._alone:
            self._handle = begin_sum(self._vector, "control")

    def receive(self) -> Agreed:
        """Waits for it.

        Raises:
            RankLostError: another rank is gone.
        """
        if self._handle is not None:
            completed(self._handle)
        rest = iter(self._vector.tolist())  # one wait for the device
        head, sums, weights, frozen = ([*islice(rest, size)] for size in self._sizes)
        stops, changes, steps, samples = head
        return Agreed(stops, changes, steps, samples, sums, weights, frozen)


def mean(total: float, weight: float) -> float:
    """Of a value over the global batch: see Sums for what a weight of 0 means."""
    return total / weight if weight else total
