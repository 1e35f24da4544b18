"""Forward and backward over this rank's micro-batches, for training and for evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hvdtrain.data.loader import Batch, to_device
from hvdtrain.engine.statistics import BatchStatistics
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.heartbeat import Activity
from hvdtrain.tasks import Task, optional


@dataclass(frozen=True)
class Sums:
    """Where the passes add up the loss and the metrics, in the order of `Accumulate.names`.

    A value that a task gives as a mean over the samples of a micro-batch is added as its part of
    the mean over the global batch, and has no weight. One that it gives as (sum, weight), such as
    a loss summed over tokens and their number, is added as it is: the mean over the global batch
    is the sum of the sums over the sum of the weights.

    Args:
        sums, weights: float64, one for each name.
    """

    sums: Tensor
    weights: Tensor


class Accumulate:
    """Gradients of one micro-batch after another are added up.

    Args:
        task, model: what is trained.
        micro_batches: in one step, over all ranks together.
        context: the device; heartbeat and timer hear of each micro-batch.

    Attributes:
        names: "loss" and the task's metrics.
        model: as given.
        statistics: of its BatchNorm layers.
    """

    def __init__(
        self, task: Task, model: nn.Module, micro_batches: int, context: RankContext
    ) -> None:
        self.names: tuple[str, ...] = ("loss", *optional(task, "metrics"))
        self.model = model
        self.statistics = BatchStatistics(model, micro_batches, context)
        self._task = task
        self._micro_batches = micro_batches
        self._context = context

    def train(
        self, batches: Iterator[Batch], passes: int, sums: Sums, before_last: Callable[[], None]
    ) -> None:
        """Forward and backward for each micro-batch of this rank; gradients are added up.

        The gradient of a mean is divided by the number of micro-batches in the global batch, so
        that the sum over passes and ranks is that of the mean over the global batch. So is that of
        (sum, weight), which `gradient_scale` turns into the mean's once all weights are known.

        Args:
            batches: this rank's micro-batches; the random numbers that a forward pass draws
                follow from the seeding that goes with each.
            passes: how many these are; may be 0.
            sums: added to.
            before_last: called before the last backward pass, when `sums` is complete.
        """
        heartbeat, enter = self._context.heartbeat, self._context.timer.enter
        heartbeat.beat(Activity.WORKING)
        self.statistics.begin()
        enter("data")
        for done, batch in enumerate(batches, start=1):
            on_device = to_device(batch, self._context.device)
            enter("forward")
            self.statistics.prepare()
            loss, values, weights = self._forward(on_device)
            _add(sums, values, weights, values / self._micro_batches, 0)
            self.statistics.collect()
            if done == passes:
                before_last()
            enter("backward")
            (loss / self._micro_batches).backward()
            enter("data")
            heartbeat.beat(Activity.WORKING)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[tuple[int, Batch]], sums: Sums) -> None:
        """Forward for each batch (samples, batch) of this rank.

        Args:
            sums: added to; the weight of a mean is the samples of its batch.
        """
        for samples, batch in batches:
            self._context.heartbeat.beat(Activity.WORKING)
            _, values, weights = self._forward(to_device(batch, self._context.device))
            _add(sums, values, weights, values * samples, samples)

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """(loss to differentiate, all values, their weights: NaN where one is a mean).

        The weights are None where all values are means.
        """
        found = self._task.loss(self.model, batch)
        values = [found[name] for name in self.names]
        if not any(isinstance(value, tuple) for value in values):
            return found["loss"], torch.stack([value.detach() for value in values]), None
        device = self._context.device
        pairs = [v if isinstance(v, tuple) else (v, math.nan) for v in values]
        totals, weights = (
            torch.stack([torch.as_tensor(v, device=device).detach().double() for v in column])
            for column in zip(*pairs, strict=True)
        )
        return pairs[0][0], totals, weights

    def gradient_scale(self, loss_weight: float) -> float:
        """What gradients are multiplied with after they were summed.

        Args:
            loss_weight: sum of the loss's weights over the global batch; 0 for means.
        """
        return self._micro_batches / loss_weight if loss_weight else 1.0


def _add(sums: Sums, values: Tensor, weights: Tensor | None, parts: Tensor, weight: float) -> None:
    """Adds the values of a micro-batch: `parts`, each of `weight`, for those that are means."""
    if weights is None:
        sums.sums.add_(parts)
        sums.weights.add_(weight)
        return
    is_mean = weights.isnan()
    sums.sums.add_(torch.where(is_mean, parts, values))
    sums.weights.add_(torch.where(is_mean, weight, weights))
