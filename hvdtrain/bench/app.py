"""hvdtrain's own loop, driven in blocks of steps."""

from __future__ import annotations

import time
from contextlib import redirect_stderr, suppress
from pathlib import Path

from torch import nn

from hvdtrain import log
from hvdtrain.bench.plain import finish
from hvdtrain.config import Settings
from hvdtrain.engine.loop import Callback, Interruptions, Loop, StepRecord
from hvdtrain.process import build
from hvdtrain.process.callbacks import Outputs, build_callbacks
from hvdtrain.process.prepare import Start, prepare, prepare_environment
from hvdtrain.process.recorder import RunRecorder
from hvdtrain.process.strategy import build_strategy
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.runtime.heartbeat import Heartbeat
from hvdtrain.runtime.init import initialize
from hvdtrain.runtime.mesh import Topology
from hvdtrain.runtime.signals import StopFlag
from hvdtrain.tasks import Datasets, Task


class AppLoop:
    """A run without evaluation and checkpoints: the loader, the step, the record, metrics.jsonl,
    the log file, the exporter, and the line on the screen, which goes to a file here.

    Args:
        settings: eval.every and checkpoint.every must be 0 if steps are timed; train.duration is
            the length of the whole run, for the schedule.
        directory: existing directory for files.
        data: the task and its datasets, if another loop shares them.
        topology: given if Horovod is already initialized.
    """

    def __init__(
        self,
        settings: Settings,
        directory: Path,
        data: tuple[Task, Datasets] | None = None,
        topology: Topology | None = None,
    ) -> None:
        if topology is None:
            prepare_environment(settings.config)
            topology = initialize()
        start = Start(time.perf_counter(), topology.local_rank)
        prepared = prepare(settings, topology, start, data)
        strategy = build_strategy(settings.config, elastic=False)
        components = build.build_components(prepared, strategy, topology)
        config = components.config
        components.heartbeat = Heartbeat()
        if components.state.sharded is not None:
            components.state.sharded.begin(topology)
        components.state.broadcast()
        context = components.context(topology)
        first = topology.rank == 0
        if first:
            log.to_screen(None)
        log.to_file(directory / "logs", topology.rank, topology.host)
        run_directory = RunDirectory(directory)
        recorder = RunRecorder(run_directory, config.checkpoint) if first else None
        if recorder is not None:
            recorder.open(0, components.exporter)
        callbacks = build_callbacks(config, components, Outputs(run_directory, recorder), context)
        self.model: nn.Module = components.state.model
        self.device = components.device
        self.exporter = components.exporter
        self.capture = components.state.capture
        self.rank = topology.rank
        self.optimizer = components.state.optimizer
        self.timer, self.precision = context.timer, components.precision
        self.every_callback = callbacks.as_list()
        self._callbacks = [*self.every_callback]
        self._block = _Block()
        self._screen = directory / f"screen-{topology.rank}"
        interruptions = Interruptions(StopFlag(), membership_changed=lambda: False)
        self._loop = build.build_loop(config, components, self._callbacks, interruptions, context)
        self._recorder = recorder
        self._strategy = strategy

    def close(self) -> None:
        """Close the loop so that this process can train another one; all ranks call this."""
        self._callbacks[:] = self.every_callback
        self._loop.close()
        if self._recorder is not None:
            self._recorder.close()
        log.close()
        self._strategy.close()

    def run(self, steps: int) -> float:
        """Train; return the seconds until the device has finished."""
        progress = self._loop.progress
        progress.record = None  # its callbacks were called in the previous block
        self._block.last = progress.step + steps
        self._callbacks[:] = [*self.every_callback, self._block]
        with open(self._screen, "a") as screen, redirect_stderr(screen):
            start = time.perf_counter()
            with suppress(_BlockEnds):
                self._loop.run()
            finish(self.device)
            return time.perf_counter() - start


class _BlockEnds(Exception):
    """Raised when the steps of a block are done."""


class _Block(Callback):
    """Callback that ends a block after its last step; the run does not continue beyond it."""

    last = 0

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        if loop.progress.step >= self.last:
            raise _BlockEnds
