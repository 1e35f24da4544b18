"""Traces of the steps in `profile.steps`, and Horovod's timeline of these steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from hvdtrain.engine.loop import Callback, Loop, StepRecord
from hvdtrain.exchange.base import Exchange
from hvdtrain.log import logger
from hvdtrain.runtime import init
from hvdtrain.runtime.collectives import begin_sum, completed
from hvdtrain.runtime.context import RankContext
from hvdtrain.telemetry.config import ProfileConfig
from hvdtrain.telemetry.profile_summary import (
    READY,
    TRACE,
    clear,
    rank_path,
    timeline_path,
    write_measurements,
)
from hvdtrain.telemetry.trace import Trace, warm_up


class Profile(Callback):
    """Record traces of the steps in `profile.steps`.

    Every rank has one Profile in each generation, as the last callback, so that a step is recorded
    with everything that is done after it. A generation that ends inside the range closes its files.

    Errors in profiling do not end the run.

    Args:
        directory: RUN/profile; created when needed.
        step: steps done when the generation begins.
    """

    def __init__(
        self,
        config: ProfileConfig,
        directory: Path,
        step: int,
        exchange: Exchange,
        context: RankContext,
    ) -> None:
        self._steps = config.range
        self._directory = directory
        self._topology = topology = context.mesh.topology
        self._timer, self._memory = context.timer, context.memory
        self._exchange = exchange
        self._device = device = context.device
        named = config.named_ranks
        self._mine = named is None or topology.rank in named
        self._failed = False
        self._first: int | None = None  # first step of the current recording
        self._trace: Trace | None = None
        self._timeline = False
        self._ready: int | None = None  # handle of the all-reduce that marks the timeline
        if step + 1 >= self._steps.stop:
            if topology.rank == 0 and not directory.exists():
                logger.warning("profile.steps %s: the run is at step %d", config.steps, step)
        elif self._mine:
            self._try(lambda: warm_up(device))
        self._reach(step + 1)

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        # After a failure the callbacks are called for the last step again: nothing is new then.
        if loop.progress.step < self._next:
            return
        if self._ready is not None:
            ready, self._ready = self._ready, None
            completed(ready)
        self._reach(loop.progress.step + 1, loop.ending)

    def close(self) -> None:
        if self._first is not None:
            self._end()

    def _reach(self, step: int, ending: bool = False) -> None:
        """Handle that `step` comes next, unless the run is at its end."""
        self._next = step
        inside = step in self._steps and not ending
        if inside and self._first is None:
            self._begin(step)
        elif not inside and self._first is not None:
            self._end()
        elif self._trace is not None:
            trace = self._trace
            self._try(lambda: trace.step(step))

    def _begin(self, step: int) -> None:
        self._first = step
        self._try(self._open_files)
        self._timer.listen(self._enter)

    def _enter(self, phase: str) -> None:
        """Handle a change of phase during a recording."""
        if phase == "comm_exposed" and self._ready is None:
            # On every rank, whatever failed on this one: the backward pass has ended.
            name = f"{READY}{self._next}"
            self._ready = begin_sum(torch.zeros(1), name)
        if self._trace is not None:
            trace = self._trace
            self._try(lambda: trace.enter(phase))

    def _open_files(self) -> None:
        assert self._first is not None
        if self._mine or self._topology.rank == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
        if self._topology.rank == 0:
            clear(self._directory, self._first)
            self._start_timeline()
        if self._mine:
            exchange = self._exchange
            self._trace = Trace(
                *(self._first, self._device, self._timer, self._memory),
                lambda: exchange.inflight_seconds,
            )

    def _start_timeline(self) -> None:
        if self._topology.world_size == 1:
            return  # no other rank to wait for
        if not init.can_start_timeline():
            logger.warning("profile: Horovod writes its timeline to the file in HOROVOD_TIMELINE")
            return
        assert self._first is not None
        init.start_timeline(timeline_path(self._directory, self._first))
        self._timeline = True

    def _end(self) -> None:
        self._timer.unlisten(self._enter)
        if self._timeline:
            self._timeline = False
            init.stop_timeline()
        self._try(self._write_files)
        self._first, self._trace = None, None

    def _write_files(self) -> None:
        first, trace, end = self._first, self._trace, self._next
        assert first is not None
        rank, host = self._topology.rank, self._topology.host
        figures = trace.stop() if trace is not None else {}
        if end == first:  # no step was finished
            timeline_path(self._directory, first).unlink(missing_ok=True)
        elif trace is not None:
            facts = {"rank": rank, "world_size": self._topology.world_size}
            path = rank_path(self._directory, rank, host, first, TRACE)
            trace.write(path, {"backend": "horovod", **facts})
            figures |= {"host": host, "steps": [first, end], "device": self._device.type, **facts}
            write_measurements(rank_path(self._directory, rank, host, first, ".json"), figures)
            logger.info("profile of steps %d to %d: %s", first, end - 1, path)

    def _try(self, part: Callable[[], None]) -> None:
        """Run `part`; log the first failure, and run nothing after it."""
        if self._failed:
            return
        try:
            part()
        except Exception as error:
            self._failed = True
            logger.warning("profile: %s; training continues without it", error)
            if self._trace is not None:
                with suppress(Exception):
                    self._trace.stop()
                self._trace = None
