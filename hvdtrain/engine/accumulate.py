"""Forward and backward over this rank's micro-batches, for training and for evaluation.

Passes is the interface that the step and the evaluation use. Accumulate implements it for a rank
that holds the whole model, Pipeline (pipeline.py) for a rank that holds pipeline stages. Forward
computes a task's loss and metrics for one micro-batch and sums them. InterleavedBackward overlaps
the gradient exchange with more of the backward passes.

Gradients are accumulated in `parameter.grad`. They are not compressed or sent here: hooks of the
exchange (hvdtrain/exchange) do that during the last backward pass.
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

# Private: the leaves of any nesting that torch supports. If torch removes it, this import fails;
# tests/single/test_torch_private.py detects it.
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
    """Forward and backward passes of a rank: Accumulate or Pipeline.

    Attributes:
        forward: computes the task's loss and metrics for a micro-batch.
        model: this rank's model.
        exact: values and statistics are summed without rounding, see Totals.
        buffers, statistics: the model's saved buffers, and BatchNorm's running statistics among
            them.
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
        """Run forward and backward for each micro-batch of this rank; gradients accumulate.

        The gradient of a mean is divided by the number of micro-batches in the global batch, so
        that the sum over passes and ranks is the gradient of the mean over the global batch. The
        gradient of (sum, weight) is divided by the same number; Forward.gradient_scale gives the
        factor that turns it into the gradient of the mean, when all weights are known.

        Args:
            batches: this rank's micro-batches; taking one also seeds the random numbers that its
                forward pass draws.
            deal: the micro-batches assigned to this rank; may be empty.
            control: receives the sums and statistics of the forward passes.
            before_last: called when these are complete, unless there is no micro-batch; before the
                last backward pass if possible.
        """

    def finish(self) -> None:
        """Complete the model's gradients after the exchange."""

    def evaluate(
        self,
        batches: Iterator[tuple[int, Batch]],
        totals: Totals,
        rows: list[Tensor] | None = None,
    ) -> None:
        """Run forward for each (samples, batch) of this rank.

        Args:
            batches: a batch of 0 samples is computed because other ranks need this rank to
                participate, but it is not counted.
            totals: added to, 3 rows of Forward.evaluation_names; the weight of a mean is the number
                of samples in its batch.
            rows: receives the task's "rows" of each batch; None: not requested.
        """


class Accumulate:
    """Passes of a rank that holds the whole model, one micro-batch after another; see Passes.

    Args:
        task, model: what is trained.
        micro_batches: in one step, over all ranks together.
        context: the device; heartbeat and timer are updated for each micro-batch.
        exact: values and statistics are summed without rounding, see Totals.
        precision: of forward passes.
        interleaved: interleaves the backward passes of a rank's last micro-batches; None:
            sequential.
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
        losses: list[Tensor] = []  # backward has not begun
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
                losses.clear()  # free the graph: the next forward pass needs the memory
            enter("data")
            heartbeat.beat(Activity.WORKING)

    def _forward(self, batch: Batch, number: int | None) -> Values:
        """Args: number: among the interleaved micro-batches; None: not interleaved."""
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
        """Nothing to do: each rank holds the whole model."""

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
    """Loss and metrics of a micro-batch.

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
        precision: of forward passes.

    Attributes:
        names: "loss" and the task's metrics.
        evaluation_names: `names` and the task's validation metrics.
        measures: the task's, see Task; None: the task has none.
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
        """Compute the values `names`; append the task's "rows" to `rows`.

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
        """Scale a loss so that gradients sum to the gradient of the global batch.

        The loss, whether a mean or the sum of (sum, weight), is divided by the number of
        micro-batches in the global batch; see `gradient_scale`. With fp16 it is also multiplied by
        the loss scale.
        """
        if self._precision.loss_scale is not None:
            loss = self._precision.loss_scale.scaled(loss)
        return loss / self._micro_batches

    def add(self, totals: Totals, values: Values) -> None:
        """Add the values of a training micro-batch, if this rank counts."""
        if self._counts:
            self._add(totals, values, values.all / self._micro_batches, 0)

    def add_samples(self, totals: Totals, values: Values, samples: int) -> None:
        """Add the values of an evaluation batch, if this rank counts.

        Args:
            samples: in the batch; a batch of 0 samples was computed only because other ranks need
                it.
        """
        if self._counts and samples:
            self._add(totals, values, values.all * samples, samples)

    def _add(self, totals: Totals, values: Values, parts: Tensor, weight: float) -> None:
        rows = rows_of(values.all, values.pairs, parts, weight)
        if not self._weighs:
            rows[1:] = 0.0  # ranks that share a sequence sum their values, but count one weight
        totals.add(rows)

    def derived(self, values: dict[str, float]) -> dict[str, float]:
        """Values that the task derives from the means of an evaluation."""
        derived = optional(self._task, "derived")
        return derived(values) if derived is not None else {}

    def gradient_scale(self, loss_weight: float) -> float:
        """Factor to apply to the gradients after they were summed.

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
    """Summands of the loss and the metrics of a micro-batch; one column per value.

    A value that a task gives as a mean over the samples of a micro-batch is added as its share of
    the mean over the global batch, and has no weight in training. A value given as (sum, weight),
    such as a loss summed over tokens and the number of tokens, is added unchanged: the mean over
    the global batch is the sum of the sums divided by the sum of the weights.

    Args:
        values: of the micro-batch.
        pairs: which values are (sum, weight), and their weights; None: no value is.
        parts: summands of the values that are means.
        weight: of these means.

    Returns:
        3 rows, float64: sums, weights, and whether the value was given as (sum, weight).
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
    """Convert 16-bit values to float32: a mean over micro-batches in 16 bits is inaccurate."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


class InterleavedBackward:
    """Backward passes of several micro-batches that take turns, block by block.

    A gradient is complete, and its bucket can be sent, when the backward pass of the last
    micro-batch reaches its layer. In sequential passes that happens only during the last pass.
    Interleaved, each micro-batch runs backward through the last block, then each through the block
    before it, and so on: breadth-first accumulation (Lamy-Poirier, "Breadth-First Pipeline
    Parallelism", arXiv:2211.05953). Micro-batches add to a gradient in the same order, so sums are
    bitwise identical. The passes run in threads, one at a time.

    Args:
        task, model: determine the blocks; at the start of a block the next micro-batch takes its
            turn.
        count: number of interleaved micro-batches.
        device: of the model; on a GPU all graphs would share one autograd thread.
        heartbeat: beats at each turn.

    Raises:
        UserError: passes through this model cannot be interleaved.
    """

    def __init__(
        self, task: Any, model: nn.Module, count: int, device: torch.device, heartbeat: Heartbeat
    ) -> None:
        self.count = count
        self._blocks = blocks_of(task, model)
        self._heartbeat = heartbeat
        self._turns = _Turns(0)
        # Persistent threads: each has its own thread pool for parallel kernels.
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
        """Wrap the forward pass of interleaved micro-batch `number`, counted from 0."""

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
        """Run backward from all losses, in the order of their numbers.

        Raises:
            Exception: the first error of any pass; the other passes have ended.
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
        """Called with the gradient of a block's input: micro-batch `number` has left the block."""
        self._heartbeat.beat(Activity.WORKING)
        self._turns.next(number)


class _Turns:
    """Scheduler of the threads; waits need no timeout, as the watchdog detects a stuck turn.

    Attributes:
        failure: the first error of any thread.
    """

    def __init__(self, count: int) -> None:
        self.failure: BaseException | None = None
        self._left = list(range(count))
        self._may_run = [threading.Semaphore(int(number == 0)) for number in range(count)]

    def run(self, number: int, work: Callable[[], Any]) -> None:
        """Run `work` when it is its turn; errors are stored in `failure`, not raised."""
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
        """Let the other threads take their turns.

        Raises:
            RuntimeError: another thread has failed.
        """
        self._may_run[self._following(number)].release()
        self._wait(number)

    def _following(self, number: int) -> int:
        return self._left[(self._left.index(number) + 1) % len(self._left)]

    def _wait(self, number: int) -> None:
        self._may_run[number].acquire()
        if self.failure is not None:
            raise RuntimeError("the backward pass of another micro-batch has failed")
