"""Forward and backward over this rank's micro-batches, for training and for evaluation.

Passes is the interface that the step and the evaluation use. Accumulate implements it for a rank
that has the whole model, Pipeline (pipeline.py) for a rank that has stages of it. Forward computes
a task's loss and metrics of one micro-batch and adds them up. InterleavedBackward overlaps the
exchange of gradients with more of the backward passes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # private, see tasks/sync_batchnorm.py

# Private: the leaves of any nesting that torch knows. If it goes, this import fails;
# tests/single/test_torch_private.py notices.
from torch.utils._pytree import tree_leaves

from hvdtrain import comm
from hvdtrain.data.deal import Deal
from hvdtrain.data.loader import Batch, to_device
from hvdtrain.engine.buffers import BatchStatistics, SavedBuffers
from hvdtrain.engine.control import ControlVector, Totals
from hvdtrain.errors import UserError
from hvdtrain.optim.precision import FLOAT32, Precision
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.heartbeat import Activity, Heartbeat
from hvdtrain.tasks import Task, optional
from hvdtrain.tasks.blocks import blocks_of

Measures = Callable[[Tensor], dict[str, float]]
_NO_COLLECTIVES = (
    "called in a backward pass, and with batch.interleave ranks with other numbers of "
    "micro-batches would call it in another order: set batch.interleave 1"
)


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


def _wide(value: Tensor) -> Tensor:
    """Of 16 bits a mean over micro-batches would be a rough one."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


class InterleavedBackward:
    """Backward passes of several micro-batches that take turns, block by block.

    A gradient is complete, and its bucket can be sent, once the last micro-batch has reached its
    layer. With one pass after the other that happens in the last pass alone. In turns, each
    micro-batch goes back through the last block, then each through the block before it, and so on:
    breadth-first accumulation (Lamy-Poirier, "Breadth-First Pipeline Parallelism",
    arXiv:2211.05953). Micro-batches add to a gradient in the same order, so that sums are bitwise
    identical. The passes run in threads, one at a time.

    Args:
        task, model: give the blocks, at whose beginning the next micro-batch has its turn.
        count: micro-batches that go back in turns.
        device: of the model; on a GPU all graphs would share one thread of autograd's.
        heartbeat: hears of each turn.

    Raises:
        UserError: passes through this model cannot take turns.
    """

    def __init__(
        self, task: Any, model: nn.Module, count: int, device: torch.device, heartbeat: Heartbeat
    ) -> None:
        self.count = count
        self._blocks = blocks_of(task, model)
        self._heartbeat = heartbeat
        self._turns = _Turns(0)
        # Threads of their own that stay: each has its own threads for parallel kernels.
        self._threads = ThreadPoolExecutor(count - 1, thread_name_prefix="backward")
        key = f"batch.interleave {count}"
        if device.type != "cpu":
            raise UserError(f"{key} is for models on CPUs, and this rank computes on {device.type}")
        if not self._blocks:
            raise UserError(
                f"{key} takes turns at blocks, and the model has none (no nn.ModuleList, and the "
                "task no blocks(model) that names them)"
            )
        if any(isinstance(m, _NormBase) and m.track_running_stats for m in model.modules()):
            raise UserError(
                f"{key} excludes BatchNorm, whose running statistics the forward pass of a "
                "micro-batch changes before an earlier one has gone back"
            )

    @contextmanager
    def forward(self, number: int) -> Iterator[None]:
        """Around the forward pass of micro-batch `number`, from 0, of those that take turns."""

        def begins(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(partial(self._is_behind, number))
                    return

        hooks = [b.register_forward_pre_hook(begins, with_kwargs=True) for b in self._blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def backward(self, losses: Sequence[Tensor]) -> None:
        """Goes back from all losses, in the order of their numbers.

        Raises:
            Exception: what one of the passes has raised first; the others have ended.
        """
        turns = self._turns = _Turns(len(losses))
        with comm.OWN.refused(_NO_COLLECTIVES):
            others = [
                self._threads.submit(turns.run, number, loss.backward)
                for number, loss in enumerate(losses[1:], start=1)
            ]
            turns.run(0, losses[0].backward)
            for other in others:
                other.result()
        if turns.failure is not None:
            raise turns.failure

    def _is_behind(self, number: int, gradient: Tensor) -> None:
        """The gradient of a block's input is there: micro-batch `number` is behind this block."""
        self._heartbeat.beat(Activity.WORKING)
        self._turns.next(number)


class _Turns:
    """Who may run; no wait needs a bound of its own, as the watchdog sees that no turn ends.

    Attributes:
        failure: the first error of any of them.
    """

    def __init__(self, count: int) -> None:
        self.failure: BaseException | None = None
        self._left = list(range(count))
        self._may_run = [threading.Semaphore(int(number == 0)) for number in range(count)]

    def run(self, number: int, work: Callable[[], Any]) -> None:
        """Does the work when it is its turn; raises nothing."""
        try:
            self._wait(number)
            work()
        except BaseException as error:
            self.failure = self.failure or error
        following = self._following(number)
        self._left.remove(number)
        if self._left:
            self._may_run[following].release()

    def next(self, number: int) -> None:
        """Lets the others have their turns.

        Raises:
            RuntimeError: one of them has failed.
        """
        self._may_run[self._following(number)].release()
        self._wait(number)

    def _following(self, number: int) -> int:
        return self._left[(self._left.index(number) + 1) % len(self._left)]

    def _wait(self, number: int) -> None:
        self._may_run[number].acquire()
        if self.failure is not None:
            raise RuntimeError("the backward pass of another micro-batch has failed")
