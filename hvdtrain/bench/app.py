"""hvdtrain's own loop, driven in blocks of steps."""

from __future__ import annotations

import time
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

from torch import nn

from hvdtrain import build, log
from hvdtrain.config import Settings
from hvdtrain.engine.run_folder import RunFolder
from hvdtrain.recorder import RunRecorder
from hvdtrain.runtime import environment
from hvdtrain.runtime.heartbeat import Heartbeat
from hvdtrain.runtime.init import choose_device, initialise
from hvdtrain.runtime.signals import StopFlag
from hvdtrain.tasks import Datasets, Task


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
        environment.prepare()
        topology = initialise()
        began = time.perf_counter()
        device = choose_device(topology)
        timer = build.build_timer(began, device)
        if data is None:
            task = build.build_task(settings)
            data = task, build.build_datasets(task, config)
        task, datasets = data
        model = build.build_model(task, config, device)
        state, exchange = build.build_state(model, config, datasets)
        state.broadcast()
        exporter = build.build_exporter(config, topology.local_rank, device, timer, exchange)
        components = build.RunComponents(
            task, datasets, device, state, exchange, Heartbeat(), timer, exporter
        )
        first = topology.rank == 0
        if first:
            log.to_screen(None)
        log.to_file(folder / "logs", topology.rank, topology.host)
        run_folder = RunFolder(folder)
        recorder = RunRecorder(run_folder, keep=1) if first else None
        if recorder is not None:
            recorder.open(0, exporter)
        callbacks = build.build_callbacks(config, components, topology, recorder, run_folder)
        self.model: nn.Module = state.model
        self.exporter = exporter
        self.capture = state.capture
        self.rank = topology.rank
        self._screen = folder / f"screen-{topology.rank}"
        self._loop = build.build_loop(config, components, topology, callbacks, StopFlag(), None)

    def run(self, steps: int) -> float:
        """Trains; returns the seconds it took."""
        progress = self._loop.progress
        self._loop.train.steps = progress.step + steps
        progress.record = None  # its callbacks were called in the block before
        with open(self._screen, "a") as screen, redirect_stderr(screen):
            start = time.perf_counter()
            self._loop.run()
            return time.perf_counter() - start
