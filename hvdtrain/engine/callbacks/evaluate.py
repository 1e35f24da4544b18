"""Validation loss every `eval.every` steps and after the last."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from hvdtrain.data.loader import to_device, validation_batches
from hvdtrain.engine.config import EvalConfig
from hvdtrain.engine.loop import Loop, StepRecord
from hvdtrain.engine.modes import evaluating
from hvdtrain.runtime.collectives import sum_
from hvdtrain.runtime.heartbeat import Activity, Heartbeat
from hvdtrain.runtime.phases import PhaseTimer
from hvdtrain.runtime.topology import Topology
from hvdtrain.tasks import Task, optional


class Evaluate:
    """Adds "validation_loss" and "validation_NAME" of the task's metrics to the record."""

    def __init__(
        self,
        config: EvalConfig,
        task: Task,
        model: nn.Module,
        dataset: Dataset[Any],
        topology: Topology,
        device: torch.device,
        heartbeat: Heartbeat,
        timer: PhaseTimer,
        seed: int,
    ) -> None:
        self._config = config
        self._task = task
        self._model = model
        self._dataset = dataset
        self._topology = topology
        self._device = device
        self._heartbeat = heartbeat
        self._timer = timer
        self._seed = seed
        self._names = ("loss", *optional(task, "metrics"))

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        if loop.preempted:
            return  # the grace period is for the checkpoint
        if loop.ending or loop.progress.step % self._config.every == 0:
            with self._timer.inside("eval"):
                values = self.evaluate(loop.batch.global_size, loop.batch.micro_size)
            record.update({f"validation_{name}": value for name, value in values.items()})

    @torch.no_grad()
    def evaluate(self, global_size: int, micro_size: int) -> dict[str, float]:
        """Means over the first samples of the validation data, the same on every rank.

        They follow from the model and the seed alone: random numbers that the task draws are
        the same for any number of ranks, and in each evaluation, so that evaluating one model
        twice gives one value.
        """
        samples = self._config.batches * global_size
        topology = self._topology
        total = torch.zeros(1 + len(self._names), dtype=torch.float64, device=self._device)
        share = validation_batches(
            self._dataset,
            samples,
            micro_size,
            rank=topology.rank,
            world_size=topology.world_size,
            seed=self._seed,
        )
        with evaluating(self._model):
            for count, batch in share:
                self._heartbeat.beat(Activity.WORKING)
                losses = self._task.loss(self._model, to_device(batch, self._device))
                total[0] += count
                total[1:] += torch.stack([losses[n].detach() for n in self._names]) * count
        self._heartbeat.beat(Activity.WAITING)
        count_all, *sums = sum_(total, "evaluate").tolist()
        return {name: value / count_all for name, value in zip(self._names, sums, strict=True)}

    def close(self) -> None:
        pass
