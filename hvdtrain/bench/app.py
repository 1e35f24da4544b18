"""hvdtrain's own loop, driven in blocks of steps."""

from __future__ import annotations

import time
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

from torch import nn

from hvdtrain import build, log
from hvdtrain.config import Settings
from hvdtrain.runtime.init import choose_device, initialise
from hvdtrain.runtime.signals import StopFlag
from hvdtrain.tasks import Datasets, Task
from hvdtrain.telemetry.metrics_file import MetricsFile


class AppLoop:
    """All that happens in a step of a run without evaluation and checkpoints: the loader,
    the step, the record, metrics.jsonl, the log file, the exporter, and the line on the
    screen, which goes to a file here.

    Args:
        settings: eval.every and checkpoint.every must be 0; train.steps is the run's whole
            length, for the schedule.
        folder: for files; there already.
        data: the task and its data sets, where another loop shares them.
    """

    def __init__(
        self, settings: Settings, folder: Path, data: tuple[Task, Datasets] | None = None
    ) -> None:
        config = replace(settings.config, train=replace(settings.config.train))  # run() changes it
        topology = initialise()
        device = choose_device(topology)
        if data is None:
            task = build.build_task(settings)
            data = task, build.build_datasets(task, config)
        task, datasets = data
        state, exchange = build.build_state(task, config, device, datasets)
        state.broadcast()
        first = topology.rank == 0
        if first:
            log.to_screen()
        log.to_file(folder / "logs", topology.rank, topology.host)
        metrics = MetricsFile(folder / "metrics.jsonl", after=0) if first else None
        callbacks = build.build_callbacks(
            config,
            task,
            datasets,
            state,
            topology,
            device,
            None,
            metrics,
            build.build_exporter(config, topology, "bench"),
        )
        self.model: nn.Module = state.model
        self.rank = topology.rank
        self._screen = folder / f"screen-{topology.rank}"
        self._loop = build.build_loop(
            config, task, datasets, state, exchange, topology, device, callbacks, StopFlag()
        )

    def run(self, steps: int) -> float:
        """Trains; returns the seconds it took."""
        self._loop.train.steps = self._loop.progress.step + steps
        with open(self._screen, "a") as screen, redirect_stderr(screen):
            start = time.perf_counter()
            self._loop.run()
            return time.perf_counter() - start
