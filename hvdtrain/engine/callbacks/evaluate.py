"""Validation loss every `eval.every` steps and after the last, and early stopping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hvdtrain import comm
from hvdtrain.data.config import BatchConfig
from hvdtrain.data.validation import ValidationData
from hvdtrain.engine.accumulate import Passes, Totals, means
from hvdtrain.engine.config import EvalConfig
from hvdtrain.engine.loop import Callback, Loop, StepRecord, since_best, with_evaluation
from hvdtrain.errors import UnsupportedTaskError
from hvdtrain.log import logger
from hvdtrain.optim.ema import Ema
from hvdtrain.runtime.collectives import gather_rows, on_all_ranks, reduce, sum_
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.heartbeat import Activity
from hvdtrain.runtime.mesh import Group


class Evaluate(Callback):
    """Add "validation_loss" and "validation_NAME" of the task's metrics and measures to the record.

    With averaged weights, also "ema_validation_loss" and the other "ema_validation_NAME".

    Args:
        ema: averaged weights; None: there are none.
        emit: called on an early stop, "early_stop" (step, best_step); on rank 0.
    """

    def __init__(
        self,
        config: EvalConfig,
        passes: Passes,
        data: ValidationData,
        context: RankContext,
        ema: Ema | None = None,
        emit: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        self._ema = ema
        self._emit = emit
        self._measures = passes.forward.measures
        self._config = config
        self._passes = passes
        self._data = data
        self._context = context

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        if loop.preempted:
            return  # the grace period is for the checkpoint
        if loop.ending or loop.due(self._config.every):
            with self._context.timer.inside("eval"):
                values = self.evaluate(loop.batch)
                record.update({f"validation_{name}": value for name, value in values.items()})
                if self._ema is not None and self._ema.started:
                    with self._ema.applied():
                        averaged = self.evaluate(loop.batch)
                    record.update({f"ema_validation_{n}": value for n, value in averaged.items()})
            self._judge(loop, values["loss"])

    def _judge(self, loop: Loop, loss: float) -> None:
        progress = loop.progress
        progress.evaluations = with_evaluation(progress.evaluations, progress.step, loss)
        if loop.stopped_early:
            best_step = progress.evaluations[0][0]
            logger.info(
                "the validation loss was lowest after step %d, %d evaluations ago: the run ends "
                "here (train.patience)",
                best_step,
                since_best(progress.evaluations),
            )
            self._emit("early_stop", step=progress.step, best_step=best_step)

    def evaluate(self, batch: BatchConfig) -> dict[str, float]:
        """Means over the first samples of the validation data, and values derived from them.

        The values are identical on every rank. They depend only on the model and the seed: random
        numbers that the task draws are identical for any number of ranks and in each evaluation, so
        evaluating one model twice gives one value.
        """
        names, context = self._passes.forward.evaluation_names, self._context
        places = self._data.places(self._config.batches, batch)
        batches = self._data.batches(places, context.mesh.batch, context.mesh.shard.size)
        parts = Totals.number_of_parts(self._passes.exact)
        rows: list[torch.Tensor] | None = None if self._measures is None else []
        zeros = torch.zeros(parts, 3, len(names), dtype=torch.float64, device=context.device)
        totals = Totals(zeros)
        with evaluating(self._passes.model):
            # In the extra micro-batch that only some ranks have, collectives are refused.
            in_common = len(places) // context.mesh.batch.size
            own = comm.COLLECTIVES.micro_batches(batches, in_common)
            self._passes.evaluate(own, totals, rows)
        context.heartbeat.beat(Activity.WAITING)
        sums = Totals(sum_(totals.parts, "evaluate")).value()
        found = means(names, sums.tolist(), len(places))
        found |= self._passes.forward.derived(found)
        if rows is not None and self._measures is not None:
            found |= self._measures(all_rows(rows, [*map(len, places)], context.mesh.batch))
        return found


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the whole model in eval mode inside the context; restore each module's mode afterwards.

    A task may keep some modules in eval mode, such as a BatchNorm that must not be trained;
    `model.train()` would change their mode. Modules that override `train` are called for both
    changes, as PyTorch would call them.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # parents come before their children
            if module.training != training:
                module.train(training)
        for module, training in modes:
            module.training = training


def all_rows(rows: Sequence[Tensor], sizes: Sequence[int], group: Group) -> Tensor:
    """Return the task's rows for the validation samples of all ranks, in the order of the data.

    Every rank calls it.

    Args:
        rows: rows of this rank's micro-batches, which are every `group.size`-th one.
        sizes: samples of each micro-batch of the evaluation.

    Returns:
        (samples, K), identical for any number of ranks.

    Raises:
        AgreedError: on every rank, if any rank does not have one row per sample.
    """
    batches = torch.arange(sum(sizes)).split([*sizes])
    wanted = [*sizes[group.rank :: group.size]]
    on_all_ranks("evaluate.rows", lambda: _check([len(part) for part in rows], wanted))
    flat = [part.reshape(len(part), -1) for part in rows]
    width = flat[0].shape[1] if flat else 0
    if group.size > 1:
        # A rank without micro-batches does not know the width.
        width = int(reduce(torch.tensor(width), "max", "evaluate.width"))
    own = torch.cat([torch.empty(0, width, dtype=torch.float64), *flat])
    if group.size == 1:
        return own
    order = [batch for rank in range(group.size) for batch in batches[rank :: group.size]]
    found = torch.empty(sum(sizes), width, dtype=torch.float64)
    found[torch.cat(order)] = gather_rows(own, "evaluate.rows")
    return found


def _check(lengths: Sequence[int], wanted: Sequence[int]) -> None:
    if lengths != wanted:
        raise UnsupportedTaskError(
            f"the task's loss() returned {list(lengths)} rows for micro-batches of {list(wanted)} "
            "samples: a task with measures() must return one row per sample"
        )
