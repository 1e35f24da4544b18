"""Forward and backward through the stages of a pipeline, see parallel/schedules.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hvdtrain import comm
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.loader import Batch, to_device
from hvdtrain.engine.accumulate import (
    BatchStatistics,
    Forward,
    SavedBuffers,
    StepTotals,
    Totals,
    Values,
)
from hvdtrain.engine.changing_buffers import ChangingBuffers
from hvdtrain.errors import UnsupportedTaskError
from hvdtrain.optim.precision import FLOAT32, Precision
from hvdtrain.parallel.cut import CutModel
from hvdtrain.parallel.schedules import Hooks, Pass, Schedules, generators
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.heartbeat import Activity
from hvdtrain.runtime.tensor_shards import local
from hvdtrain.tasks import Task

_WAITING = "comm_exposed"  # the phase of a rank between its forwards and backwards
_COLLECTIVES = (
    "the task's loss() cannot use it with parallel.pipeline: at any time the ranks of a pipeline "
    "call it for different micro-batches"
)


class _Loaded(NamedTuple):
    batch: Batch  # on the device
    draws: Tensor  # the state of torch's generators, as seeded for it
    samples: int = 0


class Pipeline:
    """Passes of one rank of a pipeline; see Passes.

    All ranks of the pipeline receive the same micro-batches. Each stage lets the task prepare them,
    and leaves its loss() when loss() has called the model, so that tasks need no code for stages.
    Only the last stage computes losses, metrics and rows; the others add nothing to them, so sums
    over all ranks are correct if each rank of a pipeline is counted once. Statistics cover the
    buffers of this rank's stages.

    `send` is called after the last backward pass: on the last stage the values are complete
    earlier, but on other stages forward and backward of a micro-batch are far apart, and torch's
    schedules do not report when the last forward is done.

    A step's micro-batches have one shape. Random numbers are those that a single rank would draw:
    the state of torch's generators is sent with the activations if a stage draws.

    Args:
        task: what is trained.
        cut: the stages of this rank.
        schedule: one of SCHEDULES.
        group: the ranks of the pipeline, in the order of their stages; its timeout limits each
            wait.
        micro_batches: in one step, over all replicas together.
        context, exact, precision: as in Accumulate.

    Attributes:
        tied: see CutModel: the norm over the ranks, the parameter count and checkpoints count these
            parameters once.
    """

    def __init__(
        self,
        task: Task,
        cut: CutModel,
        schedule: str,
        group: ProcessGroup,
        micro_batches: int,
        context: RankContext,
        exact: bool = False,
        precision: Precision = FLOAT32,
    ) -> None:
        self.model, self.exact, self.tied = cut.model, exact, cut.tied
        self.forward = Forward(task, micro_batches, context, precision)
        self.buffers = SavedBuffers(cut.model)
        self.statistics = BatchStatistics(self.buffers, micro_batches)
        self.changing: ChangingBuffers | None = None  # a script's model does not span ranks
        self._cut, self._group, self._context = cut, group, context
        self._shards = context.mesh.ranks_along("shard")
        self._own: list[_Loaded] = []
        self._values: dict[int, Values] = {}
        self._names = self.forward.names
        self._changes: Totals | None = None  # receives the statistics, in training
        self._rows: list[Tensor] | None = None
        self._busy = 0.0
        hooks = Hooks(self._compute, lambda number: self._own[number].draws, self._computing)
        parts = {stage: cut.parts(stage) for stage in cut.layout.of_rank(cut.rank)}
        self._schedules = Schedules(schedule, cut.layout, group, parts, context.device, hooks)

    def train(
        self,
        batches: Iterator[Batch],
        assignment: Assignment,
        totals: StepTotals,
        send: Callable[[bool], None],
    ) -> None:
        """See Passes.

        Raises:
            UnsupportedTaskError: micro-batches of a step differ in their shapes.
            RuntimeError: another rank of the pipeline is gone.
        """
        self._context.heartbeat.beat(Activity.WORKING)
        self.statistics.begin()
        self._context.timer.enter("data")
        own = [self._loaded(batch) for batch in batches]
        if not own:
            return
        shapes = {_shapes(loaded.batch) for loaded in own}
        if len(shapes) > 1:
            raise UnsupportedTaskError(
                "parallel.pipeline: the micro-batches of a step have different shapes, such as "
                f"{' and '.join(map(str, [*shapes][:2]))}: pad them to one shape"
            )
        self._changes, self._names = totals.statistics, self.forward.names
        found = self._run(own, self._of_shards(shapes.pop()), train=True)
        self.forward.add(totals.values, [values for _, values in found])
        self._context.timer.enter("data")
        send(True)

    @torch.no_grad()
    def evaluate(
        self,
        batches: Iterator[tuple[int, Batch]],
        totals: Totals,
        rows: list[Tensor] | None = None,
    ) -> None:
        """See Passes; only the last stage adds values."""
        self._changes, self._names, self._rows = None, self.forward.evaluation_names, rows
        most = 4 * self._cut.layout.stages  # a rank waits a fifth of the time
        loaded = (self._loaded(batch, samples) for samples, batch in batches)
        try:
            for shapes, own in _groups(loaded, most, self._of_shards):
                for number, values in self._run(own, shapes, train=False):
                    self.forward.add_samples(totals, values, own[number].samples)
        finally:
            self._rows = None

    @torch.no_grad()
    def finish(self) -> None:
        """Sum the gradients of tied parameters over the first and the last stage.

        Runs after the exchange, because the exchange may overlap with backward: then each of the
        two stages holds the sum over its replicas, and both add the same two numbers.
        """
        if not self.tied:
            return
        ranks = self._cut.layout.ranks
        other = dist.get_global_rank(self._group, ranks - 1 if self._cut.rank == 0 else 0)
        for parameter in self.tied.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = local(parameter.grad).contiguous()
            theirs = torch.empty_like(own)
            both = [
                dist.P2POp(dist.isend, own, other, self._group),
                dist.P2POp(dist.irecv, theirs, other, self._group),
            ]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            local(parameter.grad).add_(theirs)

    def _of_shards(self, shapes: Hashable) -> Hashable:
        """Shapes of all ranks that gather parameters together: they make the same trial passes."""
        if self._shards is None:
            return shapes
        found: list[Hashable] = [None] * self._shards.size()
        dist.all_gather_object(found, shapes, self._shards)
        return tuple(found)

    def _loaded(self, batch: Batch, samples: int = 0) -> _Loaded:
        device = self._context.device
        self._context.heartbeat.beat(Activity.WORKING)
        return _Loaded(to_device(batch, device), generators(device), samples)

    def _run(self, own: list[_Loaded], shapes: Hashable, train: bool) -> list[tuple[int, Values]]:
        """Values of each micro-batch, if this rank holds the last stage."""
        self._own, self._values, self._busy = own, {}, 0.0
        counts = train and self._schedules.has(len(own), shapes, train)
        waiting = self._context.timer.inside(_WAITING if train else "eval")
        began = time.perf_counter()
        try:
            with waiting, self._context.heartbeat.waiting(), comm.COLLECTIVES.refused(_COLLECTIVES):
                self._schedules.run(len(own), shapes, train)
            if counts:
                self._count(time.perf_counter() - began, self._cut.layout.bubble(len(own)))
            return sorted(self._values.items())
        finally:
            self._own, self._values = [], {}

    def _count(self, seconds: float, expected: float) -> None:
        """Count the time of a schedule; a schedule with a trial pass is not counted."""
        timer, bubble = self._context.timer, self._context.timer.bubble
        bubble.schedule_seconds += seconds
        bubble.expected += expected
        bubble.steps += 1
        timer.waited["pipeline"] += seconds - self._busy

    def _compute(self, one: Pass) -> Tensor:
        batch = self._own[one.micro_batch].batch
        changes = None if one.trial else self._changes
        rows = None if one.trial else self._rows
        if changes is not None:
            self.statistics.prepare()
        with self._fresh_buffers(keep=not one.trial):
            found = self._cut.run(
                one.stage,
                one.x,
                one.draws,
                lambda: self.forward(self.model, batch, self._names, rows),
            )
        if changes is not None:
            self.statistics.collect(changes)
        if isinstance(found, Tensor):
            return found
        if not one.trial:
            self._values[one.micro_batch] = found._replace(loss=found.loss.detach())
        return self.forward.scaled(found.loss)

    @contextmanager
    def _fresh_buffers(self, keep: bool) -> Iterator[None]:
        """Replace saved buffers by copies in a forward pass, which may change them in place.

        Backward passes of other micro-batches still need the old values.

        Args:
            keep: whether the new values are copied to the buffers afterwards.
        """
        places = self.buffers.places
        tensors = [getattr(*place) for place in places]
        for place, tensor in zip(places, tensors, strict=True):
            setattr(*place, tensor.clone())
        try:
            yield
        finally:
            with torch.no_grad():
                for place, tensor in zip(places, tensors, strict=True):
                    if keep:
                        tensor.copy_(getattr(*place))
                    setattr(*place, tensor)

    @contextmanager
    def _computing(self, phase: str) -> Iterator[None]:
        heartbeat, timer = self._context.heartbeat, self._context.timer
        heartbeat.beat(Activity.WORKING)
        began = time.perf_counter()
        try:
            with timer.inside(phase if torch.is_grad_enabled() else "eval"):
                yield
        finally:
            self._busy += time.perf_counter() - began
            heartbeat.beat(Activity.WAITING)


def _groups(
    loaded: Iterator[_Loaded], most: int, of_shards: Callable[[Hashable], Hashable]
) -> Iterator[tuple[Hashable, list[_Loaded]]]:
    """Consecutive batches of one shape, at most `most` together."""
    group: list[_Loaded] = []
    shapes: Hashable = None
    for one in loaded:
        found = of_shards(_shapes(one.batch))
        if group and (found != shapes or len(group) == most):
            yield shapes, group
            group = []
        shapes = found
        group.append(one)
    if group:
        yield shapes, group


def _shapes(batch: Batch) -> Hashable:
    """Shapes of the tensors of a batch, at any nesting depth."""
    if isinstance(batch, Tensor):
        return (*batch.shape,)
    if isinstance(batch, dict):
        return tuple((key, _shapes(value)) for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return tuple(map(_shapes, batch))
    return None
