"""Forward and backward over this rank's micro-batches, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from hvdtrain import comm
from hvdtrain.data.deal import Deal
from hvdtrain.data.loader import Batch, to_device
from hvdtrain.engine.buffers import SavedBuffers
from hvdtrain.engine.control import ControlVector, Totals
from hvdtrain.engine.forward import Forward, Values
from hvdtrain.engine.interleave import InterleavedBackward
from hvdtrain.engine.statistics import BatchStatistics
from hvdtrain.optim.precision import FLOAT32, Precision
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.heartbeat import Activity
from hvdtrain.tasks import Task


class Passes(Protocol):
    """What the step and the evaluation need: Accumulate, or Pipeline.

    Attributes:
        forward: what the task computes of a micro-batch.
        model: this rank's.
        exact: values and statistics are summed without rounding, see Totals.
        buffers, statistics: what it saves of its batches, and BatchNorm's part of that.
    """

    forward: Forward
    model: nn.Module
    exact: bool
    buffers: SavedBuffers
    statistics: BatchStatistics

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
        (sum, weight), which Forward.gradient_scale turns into the mean's once all weights are
        known.

        Args:
            batches: this rank's micro-batches; the random numbers that a forward pass draws
                follow from the seeding that goes with each.
            deal: how many these are; may be 0.
            control: what the forward passes give is added to its sums and statistics.
            before_last: called once they are complete, unless there is no micro-batch; before the
                last backward pass, where it can be.
        """

    def finish(self) -> None:
        """After the exchange of gradients, what is left to make them those of the model."""

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
            totals: added to, 3 rows of Forward.evaluation_names; the weight of a mean is the
                samples of its batch.
            rows: gets the task's "rows" of each batch; None: they are not wanted.
        """


class Accumulate:
    """Gradients of one micro-batch after another are added up; see Passes.

    Args:
        task, model: what is trained.
        micro_batches: in one step, over all ranks together.
        context: the device; heartbeat and timer hear of each micro-batch.
        exact: values and statistics are summed without rounding, see Totals.
        precision: as what forward passes are computed.
        interleaved: the last micro-batches of a rank go back in turns; None: one after the other.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        micro_batches: int,
        context: RankContext,
        exact: bool = False,
        precision: Precision = FLOAT32,
        interleaved: InterleavedBackward | None = None,
    ) -> None:
        self.model, self.exact = model, exact
        self.forward = Forward(task, micro_batches, context, precision)
        self.buffers = SavedBuffers(model)
        self.statistics = BatchStatistics(self.buffers, micro_batches)
        self._context = context
        self._interleaved = interleaved

    def train(
        self,
        batches: Iterator[Batch],
        deal: Deal,
        control: ControlVector,
        before_last: Callable[[], None],
    ) -> None:
        """See Passes."""
        heartbeat, enter = self._context.heartbeat, self._context.timer.enter
        heartbeat.beat(Activity.WORKING)
        self.statistics.begin()
        enter("data")
        own = comm.OWN.micro_batches(batches, deal.in_common, max(deal.counts))
        together = min(self._interleaved.count if self._interleaved else 1, len(deal))
        losses: list[Tensor] = []  # whose backward pass has not begun
        for done, batch in enumerate(own, start=1):
            on_device = to_device(batch, self._context.device)
            enter("forward")
            self.statistics.prepare()
            values = self._forward(on_device, len(losses) if len(deal) - done < together else None)
            self.forward.add(control.values, values)
            if self._context.mesh.counts:
                self.statistics.collect(control.statistics)
            losses.append(self.forward.scaled(values.loss))
            del values
            if done == len(deal):
                before_last()
            if done == len(deal) or done <= len(deal) - together:
                enter("backward")
                self._backward(losses)
                losses.clear()  # the graph: the next forward pass needs the memory
            enter("data")
            heartbeat.beat(Activity.WORKING)

    def _forward(self, batch: Batch, number: int | None) -> Values:
        """Args: number: among those that go back in turns; None: this one goes back alone."""
        if self._interleaved is None or number is None:
            return self.forward(self.model, batch, self.forward.names)
        with self._interleaved.forward(number):
            return self.forward(self.model, batch, self.forward.names)

    def _backward(self, losses: Sequence[Tensor]) -> None:
        if self._interleaved is None:
            losses[0].backward()
        else:
            self._interleaved.backward(losses)

    def finish(self) -> None:
        """Each rank has the whole model."""

    @torch.no_grad()
    def evaluate(
        self,
        batches: Iterator[tuple[int, Batch]],
        totals: Totals,
        rows: list[Tensor] | None = None,
    ) -> None:
        """See Passes."""
        for samples, batch in batches:
            self._context.heartbeat.beat(Activity.WORKING)
            on_device = to_device(batch, self._context.device)
            values = self.forward(self.model, on_device, self.forward.evaluation_names, rows)
            self.forward.add_samples(totals, values, samples)
