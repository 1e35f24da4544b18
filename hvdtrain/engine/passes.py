"""Forward and backward over this rank's micro-batches, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from hvdtrain import comm
from hvdtrain.data.deal import Deal
from hvdtrain.data.loader import Batch, to_device
from hvdtrain.engine.buffers import SavedBuffers
from hvdtrain.engine.control import ControlVector
from hvdtrain.engine.statistics import BatchStatistics
from hvdtrain.engine.totals import Totals
from hvdtrain.optim.precision import FLOAT32, Precision
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.heartbeat import Activity
from hvdtrain.tasks import Task, optional

Measures = Callable[[Tensor], dict[str, float]]


class Accumulate:
    """Gradients of one micro-batch after another are added up.

    Args:
        task, model: what is trained.
        micro_batches: in one step, over all ranks together.
        context: the device; heartbeat and timer hear of each micro-batch.
        exact: values and statistics are summed without rounding, see Totals.
        precision: as what forward passes are computed.

    Attributes:
        names: "loss" and the task's metrics.
        evaluation_names: these and the task's metrics of validation.
        measures: the task's, see Task; None: it has none.
        model, exact: as given.
        buffers, statistics: what it saves of its batches, and BatchNorm's part of that.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        micro_batches: int,
        context: RankContext,
        exact: bool = False,
        precision: Precision = FLOAT32,
    ) -> None:
        self.names: tuple[str, ...] = ("loss", *optional(task, "metrics"))
        self.evaluation_names = (*self.names, *optional(task, "validation_metrics"))
        self.measures: Measures | None = optional(task, "measures")
        self.model = model
        self.exact = exact
        self.buffers = SavedBuffers(model)
        self.statistics = BatchStatistics(self.buffers, micro_batches)
        self._task = task
        self._micro_batches = micro_batches
        self._context = context
        self._precision = precision

    def train(
        self,
        batches: Iterator[Batch],
        deal: Deal,
        control: ControlVector,
        before_last: Callable[[], None],
    ) -> None:
        """Forward and backward for each micro-batch of this rank; gradients are added up.

        The gradient of a mean is divided by the number of micro-batches in the global batch, so
        that the sum over passes and ranks is that of the mean over the global batch. So is that of
        (sum, weight), which `gradient_scale` turns into the mean's once all weights are known.

        Args:
            batches: this rank's micro-batches; the random numbers that a forward pass draws
                follow from the seeding that goes with each.
            deal: how many these are; may be 0.
            control: what the forward passes give is added to its sums and statistics.
            before_last: called before the last backward pass, when these are complete.
        """
        heartbeat, enter = self._context.heartbeat, self._context.timer.enter
        heartbeat.beat(Activity.WORKING)
        self.statistics.begin()
        enter("data")
        own = comm.OWN.micro_batches(batches, deal.in_common, max(deal.counts))
        for done, batch in enumerate(own, start=1):
            on_device = to_device(batch, self._context.device)
            enter("forward")
            self.statistics.prepare()
            loss, values, pairs = self._forward(on_device, self.names)
            if self._context.mesh.counts:
                add_values(control.values, values, pairs, values / self._micro_batches, 0)
                self.statistics.collect(control.statistics)
            if done == len(deal):
                before_last()
            enter("backward")
            if self._precision.loss_scale is not None:
                loss = self._precision.loss_scale.scaled(loss)
            (loss / self._micro_batches).backward()
            enter("data")
            heartbeat.beat(Activity.WORKING)

    @torch.no_grad()
    def evaluate(
        self,
        batches: Iterator[tuple[int, Batch]],
        totals: Totals,
        rows: list[Tensor] | None = None,
    ) -> None:
        """Forward for each batch (samples, batch) of this rank.

        Args:
            batches: one of 0 samples is computed, as other ranks need this one's part in it, and
                not counted.
            totals: added to, 3 rows of `evaluation_names`; the weight of a mean is the samples of
                its batch.
            rows: gets the task's "rows" of each batch; None: they are not wanted.
        """
        for samples, batch in batches:
            self._context.heartbeat.beat(Activity.WORKING)
            on_device = to_device(batch, self._context.device)
            counts = samples > 0 and self._context.mesh.counts
            rows_of_batch = rows if counts else None
            _, values, pairs = self._forward(on_device, self.evaluation_names, rows_of_batch)
            if counts:
                add_values(totals, values, pairs, values * samples, samples)

    def _forward(
        self, batch: Batch, names: Sequence[str], rows: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """(loss to differentiate, all values, which are pairs and their weights).

        The last is None where all values are means. The task's "rows" are added to `rows`.
        """
        with self._precision.autocast(self._context.device):
            found = self._task.loss(self.model, batch)
        if rows is not None:
            rows.append(found["rows"].detach().double().cpu())
        values = [found[name] for name in names]
        is_pair = [isinstance(value, tuple) for value in values]
        if not any(is_pair):
            return found["loss"], torch.stack([_wide(value.detach()) for value in values]), None
        device = self._context.device
        columns = [v if isinstance(v, tuple) else (v, 0.0) for v in values]
        totals, weights = (
            torch.stack([torch.as_tensor(v, device=device).detach().double() for v in column])
            for column in zip(*columns, strict=True)
        )
        return columns[0][0], totals, (torch.tensor(is_pair, device=device), weights)

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


def add_values(
    totals: Totals,
    values: Tensor,
    pairs: tuple[Tensor, Tensor] | None,
    parts: Tensor,
    weight: float,
) -> None:
    """Adds the loss and the metrics of a micro-batch; a value has a column.

    A value that a task gives as a mean over the samples of a micro-batch is added as its part of
    the mean over the global batch, and in training it has no weight. One that it gives as
    (sum, weight), such as a loss summed over tokens and their number, is added as it is: the mean
    over the global batch is the sum of the sums over the sum of the weights.

    Args:
        totals: 3 rows: sums, weights, and micro-batches in which it was given as (sum, weight).
        values: of the micro-batch.
        pairs: which of them are (sum, weight), and their weights; None: none is.
        parts: what is added for those that are means.
        weight: of these.
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
    totals.add(rows)
