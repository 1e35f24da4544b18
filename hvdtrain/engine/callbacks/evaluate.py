"""Validation loss every `eval.every` steps and after the last, and whether the run stops early."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvdtrain import comm
from hvdtrain.data.config import BatchConfig
from hvdtrain.data.validation import ValidationData
from hvdtrain.engine.accumulate import Passes
from hvdtrain.engine.config import EvalConfig
from hvdtrain.engine.control import Totals, means
from hvdtrain.engine.loop import Loop, StepRecord, since_best, with_evaluation
from hvdtrain.engine.modes import evaluating
from hvdtrain.engine.rows import all_rows
from hvdtrain.log import logger
from hvdtrain.optim.ema import Ema
from hvdtrain.runtime.collectives import sum_
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.heartbeat import Activity


class Evaluate:
    """Adds "validation_loss" and "validation_NAME" of the task's metrics and measures.

    With averaged weights, "ema_validation_loss" and the like too.

    Args:
        ema: None: there are none.
        emit: called with an early stop, "early_stop" (step, best_step); on rank 0.
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
        """Means over the first samples of the validation data, and what follows from them.

        They are the same on every rank. They follow from the model and the seed alone: random
        numbers that the task draws are the same for any number of ranks, and in each evaluation,
        so that evaluating one model twice gives one value.
        """
        names, context = self._passes.forward.evaluation_names, self._context
        places = self._data.places(self._config.batches, batch)
        batches = self._data.batches(places, context.mesh.batch, context.mesh.shard.size)
        parts = Totals.number_of_parts(self._passes.exact)
        rows: list[torch.Tensor] | None = None if self._measures is None else []
        zeros = torch.zeros(parts, 3, len(names), dtype=torch.float64, device=context.device)
        totals = Totals(zeros)
        with evaluating(self._passes.model):
            # Where some ranks have a micro-batch more, collectives of the task are refused.
            in_common = len(places) // context.mesh.batch.size
            own = comm.OWN.micro_batches(batches, in_common)
            self._passes.evaluate(own, totals, rows)
        context.heartbeat.beat(Activity.WAITING)
        sums = Totals(sum_(totals.parts, "evaluate")).value()
        found = means(names, sums.tolist(), len(places))
        found |= self._passes.forward.derived(found)
        if rows is not None and self._measures is not None:
            found |= self._measures(all_rows(rows, [*map(len, places)], context.mesh.batch))
        return found

    def close(self) -> None:
        pass
