"""Forward and backward over this rank's micro-batches, for training and for evaluation.

Passes is the interface that the step and the evaluation use. Accumulate implements it for a rank
that holds the whole model, Pipeline (pipeline.py) for a rank that holds pipeline stages. Forward
computes a task's loss and metrics for one micro-batch; Totals sums them, without rounding if
requested. SavedBuffers and BatchStatistics handle the buffers that a forward pass changes.

Gradients are accumulated in `parameter.grad`. They are not compressed or sent here: hooks of the
exchange (hvdtrain/exchange) do that during the last backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # private, see tasks/sync_batchnorm.py

from hvdtrain import comm
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.loader import Batch, to_device
from hvdtrain.engine.changing_buffers import ChangingBuffers
from hvdtrain.engine.interleave import InterleavedBackward
from hvdtrain.errors import EXIT_USER, UserError
from hvdtrain.exchange.watch import BETWEEN_MICRO_BATCHES, GradientWatch
from hvdtrain.optim.precision import FLOAT32, Precision
from hvdtrain.runtime.collectives import AgreedError
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.device import sent, widened
from hvdtrain.runtime.heartbeat import Activity
from hvdtrain.tasks import Task, optional

Measures = Callable[[Tensor], dict[str, float]]
# A float64 sum of multiples of one power of two is exact as long as it has at most 53 bits.
_COARSE = 2.0**-10  # so sums up to 2**43 are exact
_FINE = 2.0**-44  # smaller remainders are rounded off


class Passes(Protocol):
    """Forward and backward passes of a rank: Accumulate or Pipeline.

    Attributes:
        forward: computes the task's loss and metrics for a micro-batch.
        model: this rank's model.
        exact: values and statistics are summed without rounding, see Totals.
        buffers, statistics: the model's saved buffers, and BatchNorm's running statistics among
            them.
        changing: other buffers that a script's forward passes change; None: they are not watched.
    """

    forward: Forward
    model: nn.Module
    exact: bool
    buffers: SavedBuffers
    statistics: BatchStatistics
    changing: ChangingBuffers | None

    def train(
        self,
        batches: Iterator[Batch],
        assignment: Assignment,
        totals: StepTotals,
        send: Callable[[bool], None],
    ) -> None:
        """Run forward and backward for each micro-batch of this rank; gradients accumulate.

        The gradient of a mean is divided by the number of micro-batches in the global batch, so
        that the sum over passes and ranks is the gradient of the mean over the global batch. The
        gradient of (sum, weight) is divided by the same number; Forward.gradient_scale gives the
        factor that turns it into the gradient of the mean, when all weights are known.

        Args:
            batches: this rank's micro-batches; taking one also seeds the random numbers that its
                forward pass draws.
            assignment: the micro-batches assigned to this rank; may be empty.
            totals: receives the values and statistics of the forward passes.
            send: called when these are complete, unless there is no micro-batch: before the last
                backward pass (False), if that is possible, and after it (True).
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
        precision: precision of forward passes.
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
        self.changing: ChangingBuffers | None = None
        self.context, self.precision, self.interleaved = context, precision, interleaved

    def train(
        self,
        batches: Iterator[Batch],
        assignment: Assignment,
        totals: StepTotals,
        send: Callable[[bool], None],
    ) -> None:
        """See Passes."""
        passes = RankPasses(self, batches, assignment, totals, send)
        for batch in passes:
            passes.backward(self.forward(self.model, batch, self.forward.names))

    def begin(
        self,
        batches: Iterator[Batch],
        assignment: Assignment,
        totals: StepTotals,
        send: Callable[[bool], None],
        watch: GradientWatch | None,
    ) -> RankPasses:
        """Begin the passes of a step for a caller that computes the losses; see `train`.

        Args:
            watch: gradients that must not change between the passes; None: they are not watched.
        """
        passes = RankPasses(self, batches, assignment, totals, send)
        passes.autocast = self.precision if self.precision.casts else None
        passes.watch = watch
        passes.changing = self.changing
        return passes

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
            self.context.heartbeat.beat(Activity.WORKING)
            on_device = to_device(batch, self.context.device)
            values = self.forward(self.model, on_device, self.forward.evaluation_names, rows)
            self.forward.add_samples(totals, values, samples)


class RankPasses:
    """The passes of one step: iterating gives this rank's micro-batches, on its device.

    `backward` must be called for each micro-batch before the next one is taken.

    Args:
        owner: whose passes these are; for the others see Passes.train.

    Attributes:
        autocast: precision that applies from a micro-batch to its `backward`; None: the caller's.
        watch: see Accumulate.begin.
        changing: see Passes.
        lacking: for messages, optimizers whose losses the current micro-batch lacks.
    """

    autocast: Precision | None = None
    watch: GradientWatch | None = None
    changing: ChangingBuffers | None = None
    lacking = ""

    def __init__(
        self,
        owner: Accumulate,
        batches: Iterator[Batch],
        assignment: Assignment,
        totals: StepTotals,
        send: Callable[[bool], None],
    ) -> None:
        self._owner, self._assignment = owner, assignment
        # The same micro-batches, but a task's collective fails if other ranks have fewer of them.
        self._batches = comm.COLLECTIVES.micro_batches(
            batches, assignment.in_common, max(assignment.counts)
        )
        self._totals, self._send = totals, send
        # The backward passes of the last `together` micro-batches are interleaved.
        interleaved = owner.interleaved
        self._together = min(interleaved.count if interleaved else 1, len(assignment))
        self._losses: list[Tensor] = []  # of forward passes whose backward pass has not begun
        self._values: list[Values] = []  # of the micro-batches so far
        self._deferred: list[tuple[Tensor, Sequence[Tensor]]] = []  # see `backward_of_some`
        self._taken = self._done = 0
        self._during_forward = ExitStack()

    @property
    def forward(self) -> Forward:
        return self._owner.forward

    @property
    def complete(self) -> bool:
        """Whether `backward` was called for each micro-batch."""
        return self._done == len(self._assignment)

    def __iter__(self) -> Iterator[Batch]:
        owner, total = self._owner, len(self._assignment)
        enter = owner.context.timer.enter
        owner.context.heartbeat.beat(Activity.WORKING)
        owner.statistics.begin()
        if self.changing is not None:
            self.changing.begin()
        enter("data")
        for batch in self._batches:
            on_device = to_device(batch, owner.context.device)
            enter("forward")
            owner.statistics.prepare()
            if self.changing is not None and self._taken:
                self.changing.reset()
            self._taken += 1
            if owner.interleaved is not None and total - self._taken < self._together:
                self._during_forward.enter_context(owner.interleaved.forward(len(self._losses)))
            if self.autocast is not None:
                self._during_forward.enter_context(self.autocast.autocast(owner.context.device))
            del batch
            try:
                yield on_device
            finally:
                self._during_forward.close()
            del on_device  # the next forward pass needs the memory
            if self._done != self._taken:
                raise UserError(
                    f"step.backward was not called for a micro-batch{self.lacking}: the gradient "
                    "of the global batch would lack it"
                )
        if self.changing is not None:
            self.changing.end()

    def _check_turn(self) -> None:
        if self._done == self._taken:
            raise UserError(
                "step.backward was called twice for a micro-batch: add the losses, and call it once"
                if self._taken
                else "step.backward was called before a micro-batch was taken: for batch in step"
            )

    def _note(self) -> None:
        if self.watch is not None:
            self.watch.note(partial=True)

    def _require_unchanged(self) -> None:
        if self.watch is not None:
            self.watch.require_unchanged(BETWEEN_MICRO_BATCHES)

    def backward_of_some(
        self, loss: Tensor, parameters: Sequence[Tensor], others: Sequence[Tensor]
    ) -> None:
        """Run a backward pass to some parameters, before `backward` runs the one to the others.

        While a loss also depends on `others`, all passes are deferred: their loss may be the same
        tensor, or share its graph, which a backward pass frees.
        """
        self._check_turn()
        self._deferred.append((loss, parameters))
        if not any(depends_on(deferred, others) for deferred, _ in self._deferred):
            self._run_deferred()

    def _run_deferred(self, keep_graph: bool = False) -> None:
        self._owner.context.timer.enter("backward")
        self._require_unchanged()
        for number, (loss, parameters) in enumerate(self._deferred, start=1):
            keeps = keep_graph or number < len(self._deferred)
            self._backward(self.forward.scaled(loss), parameters, keeps)
        self._deferred.clear()
        self._note()
        self._owner.context.timer.enter("forward")

    def _backward(
        self, loss: Tensor, parameters: Sequence[Tensor], keep_graph: bool = False
    ) -> None:
        inputs = [p for p in parameters if p.requires_grad]
        if inputs:
            loss.backward(inputs=inputs, retain_graph=keep_graph)

    def backward(self, values: Values, parameters: Sequence[Tensor] | None = None) -> None:
        """Count the values of the micro-batch that was taken last, and run its backward pass.

        With batch.interleave, the last backward passes run together, in the last call.

        Args:
            parameters: that get gradients; None: all.
        """
        owner, context = self._owner, self._owner.context
        self._during_forward.close()
        self._check_turn()
        self._require_unchanged()
        self._done += 1
        self._values.append(values._replace(loss=values.loss.detach()))  # without its graph
        if context.mesh.counts:
            owner.statistics.collect(self._totals.statistics)
        if self._deferred:
            # One pass for all parameters that have the same loss.
            same = [some for loss, some in self._deferred if loss is values.loss]
            parameters = [p for some in (*same, parameters or ()) for p in some]
            self._deferred = [one for one in self._deferred if one[0] is not values.loss]
            self._run_deferred(keep_graph=True)
        self._losses.append(owner.forward.scaled(values.loss))
        del values
        if self.complete:
            owner.forward.add(self._totals.values, self._values)
            if self.changing is not None:
                self.changing.look()
            self._send(False)  # the totals are complete
        # In the last backward pass, hooks of the exchange compress and send the gradients.
        if self.complete or self._done <= len(self._assignment) - self._together:
            context.timer.enter("backward")
            if owner.interleaved is not None:
                owner.interleaved.backward(self._losses)
            elif parameters is None:
                self._losses[0].backward()
            else:
                self._backward(self._losses[0], parameters)
            self._losses.clear()  # free the graph: the next forward pass needs the memory
        if self.complete:
            self._send(True)
        self._note()
        context.timer.enter("data")
        context.heartbeat.beat(Activity.WORKING)


def depends_on(loss: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether a backward pass of the loss can reach one of the parameters."""
    searched, nodes, seen = {*parameters}, [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", None) in searched:  # of the node that accumulates a gradient
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


class StepTotals(NamedTuple):
    """Sums over the forward passes of a step.

    Args:
        values: values of the loss and the metrics, 3 rows, see `rows_of`.
        statistics: sums of the changes of BatchNorm's running statistics, see BatchStatistics.
    """

    values: Totals
    statistics: Totals


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
        precision: precision of forward passes.

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
        self._masks: dict[tuple[bool, ...], Tensor] = {}  # on the device

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
        return self.values(found, names)

    def values(self, found: Mapping[str, Any], names: Sequence[str]) -> Values:
        """Return the values `names` of a micro-batch, given as Task.loss returns them."""
        values = [found[name] for name in names]
        is_pair = tuple(isinstance(value, tuple) for value in values)
        if not any(is_pair):
            # A mean over micro-batches in 16 bits is inaccurate.
            stacked = torch.stack([widened(value.detach()) for value in values])
            return Values(found["loss"], stacked, None)
        columns = [v if isinstance(v, tuple) else (v, 0.0) for v in values]
        totals, weights = (
            torch.stack([self._scalar(value) for value in column])
            for column in zip(*columns, strict=True)
        )
        if is_pair not in self._masks:
            self._masks[is_pair] = sent(torch.tensor(is_pair), self._device)
        return Values(columns[0][0], totals, (self._masks[is_pair], weights))

    def _scalar(self, value: Tensor | float) -> Tensor:
        """Return a value as a float64 scalar on the device, without waiting for the device."""
        if not isinstance(value, Tensor) and type(value) in (int, float):
            return torch.full((), value, device=self._device).double()
        scalar = torch.as_tensor(value).detach()  # a task may count with a tensor on the CPU
        if scalar.device.type == "cpu":
            scalar = sent(scalar, self._device)
        return scalar.to(self._device, torch.float64)

    def scaled(self, loss: Tensor) -> Tensor:
        """Scale a loss so that gradients sum to the gradient of the global batch.

        The loss, whether a mean or the sum of (sum, weight), is divided by the number of
        micro-batches in the global batch; see `gradient_scale`. With fp16 it is also multiplied by
        the loss scale.
        """
        if self._precision.loss_scale is not None:
            loss = self._precision.loss_scale.scaled(loss)
        return loss / self._micro_batches if self._micro_batches > 1 else loss

    def add(self, totals: Totals, values: Sequence[Values]) -> None:
        """Add the values of training micro-batches, if this rank counts."""
        if self._counts and values:
            given = torch.stack([one.all for one in values])
            pairs = [one.pairs for one in values]
            self._add(totals, rows_of(given, pairs, given / self._micro_batches, 0))

    def add_samples(self, totals: Totals, values: Values, samples: int) -> None:
        """Add the values of an evaluation batch, if this rank counts.

        Args:
            samples: in the batch; a batch of 0 samples was computed only because other ranks need
                it.
        """
        if self._counts and samples:
            given = values.all[None]
            self._add(totals, rows_of(given, [values.pairs], given * samples, samples))

    def _add(self, totals: Totals, rows: Tensor) -> None:
        if not self._weighs:
            rows[:, 1:] = 0.0  # ranks that share a sequence sum their values, but count one weight
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
    pairs: Sequence[tuple[Tensor, Tensor] | None],
    parts: Tensor,
    weight: float,
) -> Tensor:
    """Summands of the loss and the metrics of micro-batches; one column per value.

    A value that a task gives as a mean over the samples of a micro-batch is added as its share of
    the mean over the global batch, and has no weight in training. A value given as (sum, weight),
    such as a loss summed over tokens and the number of tokens, is added unchanged: the mean over
    the global batch is the sum of the sums divided by the sum of the weights.

    Args:
        values: (micro-batches, values).
        pairs: for each micro-batch, see Values.
        parts: summands of the values that are means, (micro-batches, values).
        weight: weight of these means.

    Returns:
        Float64, (micro-batches, 3, values). The 3 rows are sums, weights, and whether the value was
        given as (sum, weight).
    """
    count, columns = parts.shape
    rows = torch.zeros(count, 3, columns, dtype=torch.float64, device=parts.device)
    if not any(pairs):
        rows[:, 0] = parts
        if weight:
            rows[:, 1] = weight
        return rows
    none = parts.new_zeros(columns, dtype=torch.bool), rows.new_zeros(columns)
    is_pair, weights = map(torch.stack, zip(*(one or none for one in pairs), strict=True))
    rows[:, 0] = torch.where(is_pair, values, parts)
    rows[:, 1] = torch.where(is_pair, weights, weight)
    rows[:, 2] = is_pair
    return rows


def means(names: Sequence[str], sums: Sequence[Sequence[float]], batches: int) -> dict[str, float]:
    """Mean of each value over all micro-batches.

    Args:
        names: names of the values.
        sums: the 3 rows of `accumulate.rows_of`, summed over all ranks.
        batches: number of micro-batches.

    Raises:
        AgreedError: some micro-batches gave a value as (sum, weight), others as a mean; raised on
            every rank.
    """
    found = {}
    for name, total, weight, pairs in zip(names, *sums, strict=True):
        if 0 < pairs < batches:
            raise AgreedError(
                f"{name!r} was (sum, weight) for {pairs:.0f} and a mean for {batches - pairs:.0f} "
                f"of {batches} micro-batches whose average is taken: step.backward, or a task's "
                "loss(), gives it in the same form for each",
                EXIT_USER,
                rank=0,
            )
        # In training, means have no weight: their sums are means already. The mean over no sample
        # or token, such as the loss of a source that a step does not use, is unknown.
        unknown = math.nan if pairs and name != "loss" else total
        found[name] = total / weight if weight else unknown
    return found


class Totals:
    """Elementwise sums of float64 numbers.

    Args:
        parts: float64 zeros, (1, ...) or (2, ...). With one part, sums are rounded as usual, and
            the last bits depend on the order of the additions. With two, each number is added as a
            multiple of 2**-10, and its remainder as a multiple of 2**-44: both sums are exact, so
            the result does not depend on the order or the number of the ranks.

    Attributes:
        parts: as given; to sum over ranks, sum these.
    """

    def __init__(self, parts: Tensor) -> None:
        self.parts = parts

    @staticmethod
    def number_of_parts(exact: bool) -> int:
        return 2 if exact else 1

    def add(self, numbers: Tensor) -> None:
        """Add numbers.

        Args:
            numbers: (count, ...), of which each has the shape of a part; any floating-point dtype.
        """
        if len(self.parts) == 1:
            for addend in numbers.unbind():  # in this order: it decides the last bits
                self.parts[0].add_(addend)
            return
        numbers = numbers.double()
        coarse = _rounded(numbers, _COARSE)
        self.parts[0].add_(coarse.sum(dim=0))
        # An infinite number has no remainder.
        self.parts[1].add_(_rounded((numbers - coarse).nan_to_num_(0.0), _FINE).sum(dim=0))

    def value(self) -> Tensor:
        """Return the sums."""
        return self.parts.sum(dim=0) if len(self.parts) > 1 else self.parts[0]


def _rounded(numbers: Tensor, unit: float) -> Tensor:
    return (numbers / unit).round_().mul_(unit)


class SavedBuffers:
    """Copies of saved buffers, such as BatchNorm's statistics, which change before a step can fail.

    Covers the buffers in `state_dict`, even if a module replaces a buffer by a new tensor. Not
    covered, unless added: buffers registered with persistent=False and tensors that are plain
    attributes. They are not saved either, so they are not part of a run's state.

    Attributes:
        places: module and name of each buffer.
        values: values at the last `keep`, in the order of `places`.
    """

    def __init__(self, model: nn.Module) -> None:
        saved = model.state_dict()
        self.places = [
            (module, name)
            for prefix, module in model.named_modules()
            for name, _ in module.named_buffers(recurse=False, remove_duplicate=False)
            if (f"{prefix}.{name}" if prefix else name) in saved
        ]
        self.values: list[Tensor] = []
        self._tensors: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the current values."""
        tensors = [getattr(module, name) for module, name in self.places]
        if [t.shape for t in tensors] != [v.shape for v in self.values]:
            self.values = [tensor.detach().clone() for tensor in tensors]
        elif tensors:
            torch._foreach_copy_(self.values, tensors)  # private, see step.py
        self._tensors = tensors

    def by_place(self) -> dict[tuple[nn.Module, str], Tensor]:
        """Return the values of the last `keep`, not copies."""
        return dict(zip(self.places, self.values, strict=True))

    def add(self, place: tuple[nn.Module, str], tensor: Tensor, value: Tensor) -> None:
        """Also restore this tensor from now on, even in the step that has begun."""
        if place not in self.places:
            self.places.append(place)
            self.values.append(value)
            self._tensors.append(tensor)

    @torch.no_grad()
    def swap(self) -> None:
        """Restore the values of the last `keep`, and keep the current values in their place."""
        now = [getattr(module, name).detach().clone() for module, name in self.places]
        self.restore()
        self.values = now

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values of the last `keep`."""
        for (module, name), tensor, value in zip(
            self.places, self._tensors, self.values, strict=True
        ):
            tensor.copy_(value)
            setattr(module, name, tensor)


class BatchStatistics:
    """Average of the micro-batches' changes to the running statistics, over the global batch.

    A layer normalizes with the statistics of its micro-batch, as in plain PyTorch. In plain PyTorch
    the running statistics depend on the order of a rank's micro-batches. Here each micro-batch
    starts from the statistics before the step, and the step adds the mean of all changes: with
    momentum m they become (1 - m) * before + m * (mean over all micro-batches of the global batch).

    A layer in eval mode keeps its statistics bitwise identical.

    Args:
        saved: the model's saved buffers; `keep` must run before a step begins.
        micro_batches: in one step, over all ranks together.

    Attributes:
        numel: number of elements of all statistics together.
    """

    def __init__(self, saved: SavedBuffers, micro_batches: int) -> None:
        self._saved = saved
        self._numbers = [
            number for number, (m, _) in enumerate(saved.places) if isinstance(m, _NormBase)
        ]
        self._micro_batches = micro_batches
        buffers = self._buffers()
        self.numel = sum(buffer.numel() for buffer in buffers)
        # All statistics as one float64 vector, and a view of it for each buffer.
        self._start, self._start_of = _vector(buffers)
        self._now, self._now_of = _vector(buffers)
        self._before: list[Tensor] = []

    def begin(self) -> None:
        """Prepare for a step; call it before the first forward pass."""
        if not self.numel:
            return
        self._before = [self._saved.values[number] for number in self._numbers]
        torch._foreach_copy_(self._start_of, self._before)

    def prepare(self) -> None:
        """Reset the statistics to the values at `begin`, before the forward pass of a micro-batch.

        Backward also changes the statistics if it recomputes activations.
        """
        if self.numel:
            torch._foreach_copy_(self._buffers(), self._before)

    def collect(self, changes: Totals) -> None:
        """Add the changes of a micro-batch to `changes`; call it after its forward pass.

        Args:
            changes: `numel` elements.
        """
        if self.numel:
            with torch.no_grad():
                torch._foreach_copy_(self._now_of, self._buffers())
                changes.add(self._now.sub_(self._start)[None])

    @torch.no_grad()
    def apply(self, changes: Tensor) -> None:
        """Apply the mean change.

        Args:
            changes: summed over all micro-batches of the global batch.
        """
        if self.numel:
            # Divided after summing: a counter that each micro-batch raises by one rises by one.
            torch.add(self._start, changes / self._micro_batches, out=self._now)
            torch._foreach_copy_(self._buffers(), self._now_of)

    def _buffers(self) -> list[Tensor]:
        # Looked up each time: a forward pass may replace a buffer by a new tensor.
        places = self._saved.places
        return [getattr(*places[number]) for number in self._numbers]


def _vector(buffers: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    sizes = [buffer.numel() for buffer in buffers]
    device = buffers[0].device if buffers else None
    vector = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
    parts = vector.split(sizes) if sizes else ()
    return vector, [p.view_as(b) for p, b in zip(parts, buffers, strict=True)]
