"""What a task computes of one micro-batch, and how it is added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hvdtrain.data.loader import Batch
from hvdtrain.engine.control import Totals
from hvdtrain.optim.precision import Precision
from hvdtrain.runtime.context import RankContext
from hvdtrain.tasks import Task, optional

Measures = Callable[[Tensor], dict[str, float]]


class Values(NamedTuple):
    """Of a micro-batch.

    Args:
        loss: to differentiate.
        all: the loss and the metrics, (values,).
        pairs: which of them are sums, and their weights, (values,) each; None: all are means.
    """

    loss: Tensor
    all: Tensor
    pairs: tuple[Tensor, Tensor] | None


class Forward:
    """The task's loss and metrics of a micro-batch.

    Args:
        task: see Task.
        micro_batches: in one step, over all ranks together.
        context: the device; and whether this rank counts, see Mesh.
        precision: as what forward passes are computed.

    Attributes:
        names: "loss" and the task's metrics.
        evaluation_names: these and the task's metrics of validation.
        measures: the task's, see Task; None: it has none.
    """

    def __init__(
        self, task: Task, micro_batches: int, context: RankContext, precision: Precision
    ) -> None:
        self.names: tuple[str, ...] = ("loss", *optional(task, "metrics"))
        self.evaluation_names = (*self.names, *optional(task, "validation_metrics"))
        self.measures: Measures | None = optional(task, "measures")
        self._task = task
        self._micro_batches = micro_batches
        self._device = context.device
        self._counts = context.mesh.counts
        self._weighs = context.mesh.weighs
        self._precision = precision

    def __call__(
        self,
        model: nn.Module,
        batch: Batch,
        names: Sequence[str],
        rows: list[Tensor] | None = None,
    ) -> Values:
        """Those of `names`; the task's "rows" are added to `rows`.

        Args:
            batch: on the device.
        """
        with self._precision.autocast(self._device):
            found = self._task.loss(model, batch)
        if rows is not None:
            rows.append(found["rows"].detach().double().cpu())
        values = [found[name] for name in names]
        is_pair = [isinstance(value, tuple) for value in values]
        if not any(is_pair):
            stacked = torch.stack([_wide(value.detach()) for value in values])
            return Values(found["loss"], stacked, None)
        columns = [v if isinstance(v, tuple) else (v, 0.0) for v in values]
        totals, weights = (
            torch.stack([torch.as_tensor(v, device=self._device).detach().double() for v in column])
            for column in zip(*columns, strict=True)
        )
        pairs = torch.tensor(is_pair, device=self._device), weights
        return Values(columns[0][0], totals, pairs)

    def scaled(self, loss: Tensor) -> Tensor:
        """What backward begins with, so that gradients add up to that of the global batch.

        The gradient of a mean is divided by the number of micro-batches in the global batch; so is
        that of (sum, weight), see `gradient_scale`.
        """
        if self._precision.loss_scale is not None:
            loss = self._precision.loss_scale.scaled(loss)
        return loss / self._micro_batches

    def add(self, totals: Totals, values: Values) -> None:
        """Adds those of a training micro-batch, where this rank counts."""
        if self._counts:
            self._add(totals, values, values.all / self._micro_batches, 0)

    def add_samples(self, totals: Totals, values: Values, samples: int) -> None:
        """Adds those of a batch in evaluation, where this rank counts.

        Args:
            samples: of the batch; one of 0 was computed for the other ranks' sake.
        """
        if self._counts and samples:
            self._add(totals, values, values.all * samples, samples)

    def _add(self, totals: Totals, values: Values, parts: Tensor, weight: float) -> None:
        rows = rows_of(values.all, values.pairs, parts, weight)
        if not self._weighs:
            rows[1:] = 0.0  # sums of ranks that share a sequence add up, their weights are the same
        totals.add(rows)

    def derived(self, values: dict[str, float]) -> dict[str, float]:
        """What the task makes of the means of an evaluation, beside these."""
        derived = optional(self._task, "derived")
        return derived(values) if derived is not None else {}

    def gradient_scale(self, loss_weight: float) -> float:
        """What gradients are multiplied with after they were summed.

        Args:
            loss_weight: sum of the loss's weights over the global batch; 0 for means.
        """
        return self._micro_batches / loss_weight if loss_weight else 1.0


def _wide(value: Tensor) -> Tensor:
    """Of 16 bits a mean over micro-batches would be a rough one."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def rows_of(
    values: Tensor,
    pairs: tuple[Tensor, Tensor] | None,
    parts: Tensor,
    weight: float,
) -> Tensor:
    """What is added up of the loss and the metrics of a micro-batch; a value has a column.

    A value that a task gives as a mean over the samples of a micro-batch is added as its part of
    the mean over the global batch, and in training it has no weight. One that it gives as
    (sum, weight), such as a loss summed over tokens and their number, is added as it is: the mean
    over the global batch is the sum of the sums over the sum of the weights.

    Args:
        values: of the micro-batch.
        pairs: which of them are (sum, weight), and their weights; None: none is.
        parts: what is added for those that are means.
        weight: of these.

    Returns:
        3 rows, float64: sums, weights, and whether it was given as (sum, weight).
    """
    rows = torch.zeros(3, len(parts), dtype=torch.float64, device=parts.device)
    if pairs is None:
        rows[0] = parts
        rows[1] = weight
    else:
        is_pair, weights = pairs
        rows[0] = torch.where(is_pair, values, parts)
        rows[1] = torch.where(is_pair, weights, weight)
        rows[2] = is_pair
    return rows
